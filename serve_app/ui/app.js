// The page as a whole: its views, its language, the key, and the word on the connection.

import { key, useKey } from "./api.js";
import { byId, kept } from "./dom.js";
import { feed } from "./feed.js";
import * as models from "./models.js";
import * as play from "./play.js";
import * as traffic from "./traffic.js";
import { preferred, say, speak, write } from "./words.js";

const VIEWS = ["play", "models", "traffic"];

function view() {
  const wanted = location.hash.slice(1);
  const shown = VIEWS.includes(wanted) ? wanted : "play";
  for (const name of VIEWS) byId(name).hidden = name !== shown;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${shown}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  traffic.look(shown === "traffic");
}

function relabel() {
  play.relabel();
  models.show();
  traffic.relabel();
  link();
}

let wasLost = false;

function link() {
  const { link: state, fault } = feed.state;
  const node = byId("link");
  node.parentNode.dataset.link = state;
  byId("retry").hidden = state !== "lost" && state !== "refused";
  say(node, state === "live" && wasLost ? "link.back" : `link.${state}`, fault?.words);
}

// A person must have the time to read that it is back; then it is just live.
const BACK_MS = 6000;

function connection() {
  const { link: state, fault } = feed.state;
  if (state === "lost" || state === "refused") wasLost = true;
  link();
  if (state === "live" && wasLost) {
    setTimeout(() => {
      wasLost = false;
      link();
    }, BACK_MS);
  }
  if (state === "locked") askForKey(fault);
}

function askForKey(fault) {
  const wrong = byId("key-wrong");
  // The first visit is no mistake; a key that was not taken is.
  wrong.hidden = !fault || !key();
  write(wrong, fault?.words ?? "");
  byId("key").value = "";
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
  byId("key").focus();
}

function keys() {
  const dialog = byId("key-dialog");
  const use = (value) => {
    useKey(value);
    dialog.close();
    feed.connect();
  };
  byId("open-key").addEventListener("click", () => askForKey(null));
  byId("key-close").addEventListener("click", () => dialog.close());
  byId("key-forget").addEventListener("click", () => use(""));
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (byId("key").value.trim()) use(byId("key").value.trim());
  });
}

function about() {
  const { version, policy, router } = feed.hello;
  say(byId("about"), "about", version, policy, router);
}

const language = byId("language");
language.value = kept("language") ?? preferred();
speak(language.value);
language.addEventListener("change", () => {
  speak(kept("language", language.value));
  relabel();
});
byId("skip").addEventListener("click", () => byId("main").focus());
byId("retry").addEventListener("click", () => feed.connect());
addEventListener("hashchange", view);
// The network is back, or the person is: no need to wait for the next try.
addEventListener("online", () => feed.state.link === "lost" && feed.connect());
keys();
play.start();
models.start();
traffic.start();
feed.addEventListener("state", connection);
feed.addEventListener("hello", about);
view();
link();
feed.connect();
