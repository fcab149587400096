// Every model: how it is, who uses it, what memory it takes; and orders, for those who may give them.

import { call, Fault } from "./api.js";
import { announce, byId, el, sure } from "./dom.js";
import { feed } from "./feed.js";
import { duration, named, number, say, sayIn, write } from "./words.js";

const ON_THE_WAY = new Set(["loading", "waking", "falling_asleep", "unloading"]);

const cards = new Map();

const gb = (bytes) => number(bytes / 1e9, 1);

// A card is made once and changed in place: whoever has the keyboard on it must not lose it.
class Card {
  constructor(id) {
    this.id = id;
    this.state = el("strong", {});
    this.tags = el("p", { class: "tags soft" });
    this.progress = el("progress", { max: 1, hidden: true });
    sayIn(this.progress, "aria-label", "order.of", "@stage.loading", id);
    this.phase = el("span", { class: "soft" });
    this.error = el("p", { class: "error", hidden: true });
    this.facts = new Map();
    this.list = el("dl", { class: "facts" });
    this.memory = el("div", { class: "memory" });
    this.replicas = el("ul", { class: "replicas soft" });
    this.orders = el("div", { class: "row" });
    this.said = el("p", { class: "soft", role: "status" });
    this.node = el(
      "li",
      { class: "card model" },
      el("h3", { text: id, dir: "auto" }),
      el("p", {}, this.state, " ", this.phase),
      this.progress,
      this.error,
      this.tags,
      this.list,
      this.memory,
      this.replicas,
      this.orders,
      this.said,
    );
    this.buttons = new Map();
  }

  show(model, pool, admin) {
    this.model = model;
    this.node.dataset.state = model.state;
    const up = model.state === "awake";
    const moves = ON_THE_WAY.has(model.state);
    // What is always loaded is hot.
    write(this.state, named("stage", up && model.tier !== "lazy" ? "hot" : model.state));
    this.state.className = `badge ${up ? "good" : moves ? "warn" : model.state === "failed" ? "bad" : "soft"}`;
    this.progress.hidden = !moves;
    if (model.progress === null) this.progress.removeAttribute("value");
    else this.progress.value = model.progress;
    const percent = model.progress ? `${Math.round(model.progress * 100)} %` : "";
    write(this.phase, moves ? [model.phase, percent].filter(Boolean).join(" · ") : "");
    this.error.hidden = !model.error;
    write(this.error, model.error ?? "");
    this.#tags(model);
    this.#fact("running", number(model.running));
    this.#fact("waiting", number(model.waiting));
    this.#fact("queued", number(model.queued));
    this.#fact("used", ...this.#used(model));
    this.#fact("wake", model.wake_s ? duration(model.wake_s * 1000) : "");
    this.#fact("context", number(model.context));
    this.#bars(model, pool);
    this.#replicas(model);
    this.#orders(model, admin);
  }

  #used({ last_used_s: ago, running }) {
    if (running) return [null, "used.now"];
    if (ago === null) return [null, "used.never"];
    return [null, "used.ago", duration(Math.round(ago + feed.age()) * 1000)];
  }

  // `value`: a text as it is, or null and a word.
  #fact(name, value, ...words) {
    let found = this.facts.get(name);
    if (!found) {
      found = el("dd", {});
      this.facts.set(name, found);
      this.list.append(el("div", {}, el("dt", { said: name }), found));
    }
    found.parentNode.hidden = value === "";
    if (value === null) say(found, ...words);
    else write(found, value);
  }

  #tags({ tier, thinking, pinned, abilities, id }) {
    const keys = [`tier.${tier}`];
    if (feed.hello?.default === id) keys.push("default");
    if (thinking) keys.push("thinks");
    if (pinned) keys.push("pinned");
    const made = JSON.stringify([keys, abilities]);
    if (this.tags.dataset.made === made) return;
    this.tags.dataset.made = made;
    this.tags.replaceChildren(
      ...keys.map((key) => el("span", { class: "tag", said: key })),
      ...(abilities ?? []).map((text) => el("span", { class: "tag", text })),
    );
  }

  #bars({ gpu_bytes: gpu, host_bytes: host }, pool) {
    meter(this.memory, accelerator(), gpu, pool?.gpu_budget, this.id);
    meter(this.memory, "host", host, pool?.host_budget, this.id);
  }

  #replicas({ replicas = [] }) {
    const nodes = new Map(feed.models.nodes.map(({ id, name }) => [id, name]));
    const made = JSON.stringify([replicas, ...nodes]);
    if (this.replicas.dataset.made === made) return;
    this.replicas.dataset.made = made;
    this.replicas.hidden = !replicas.length;
    this.replicas.replaceChildren(
      ...replicas.map(({ id, node, state }) => el("li", { said: ["replica", id, nodes.get(node) ?? "?", `@stage.${state}`] })),
    );
  }

  #orders({ tier, state, pinned }, admin) {
    const may = admin && tier === "lazy";
    this.orders.hidden = !may;
    if (!may) return;
    this.#button("load", ["stopped", "failed", "asleep"].includes(state));
    this.#button("sleep", state === "awake");
    this.#button("unload", state === "awake" || state === "asleep");
    this.#button("pin", !pinned, pinned);
    this.#button("unpin", pinned, !pinned);
  }

  #button(order, possible, hidden = false) {
    let button = this.buttons.get(order);
    if (!button) {
      button = el("button", { type: "button", class: "small", said: `order.${order}`, "data-order": order });
      sayIn(button, "aria-label", "order.of", `@order.${order}`, this.id);
      button.addEventListener("click", () => this.#order(order));
      this.buttons.set(order, button);
      this.orders.append(button);
    }
    // Not `disabled`: that would take the keyboard away from whoever has just pressed it.
    button.setAttribute("aria-disabled", String(!possible));
    button.hidden = hidden;
  }

  async #order(order) {
    if (this.buttons.get(order).getAttribute("aria-disabled") === "true") return;
    const used = this.model.running + this.model.waiting;
    const hurts = order === "unload" || (order === "sleep" && used);
    if (hurts && !(await sure(`order.${order}`, `sure.${order}`, this.id, used))) return;
    try {
      await call(`v1/router/models/${encodeURIComponent(this.id)}/${order}`, { method: "POST" });
      this.said.className = "soft";
      say(this.said, "order.done", this.id, `@order.${order}`);
    } catch (error) {
      if (!(error instanceof Fault)) throw error;
      this.said.className = "error";
      write(this.said, error.words);
      announce(error.title);
    }
  }
}

// Where there is no GPU, what the feed calls a GPU's memory is the machine's.
const accelerator = () => (feed.models.nodes.some(({ gpus }) => gpus) ? "gpu" : "ram");

// A bar of memory against its budget, made once; away where nothing is known.
function meter(place, name, used, budget, of) {
  let row = place.querySelector(`[data-meter="${name}"]`);
  if (!row) {
    const bar = el("meter", { min: 0 });
    sayIn(bar, "aria-label", "order.of", `@${name}`, of);
    row = el("div", { class: "bar", "data-meter": name }, el("span", { said: name }), bar, el("span", { class: "figure" }));
    place.append(row);
  }
  row.hidden = !used && !budget;
  const [, bar, figure] = row.children;
  bar.hidden = !budget;
  bar.max = budget || 1;
  bar.value = used ?? 0;
  bar.dataset.full = String(used > 0.92 * budget);
  if (budget) say(figure, "memory", gb(used ?? 0), gb(budget));
  else say(figure, "memory.one", gb(used ?? 0));
}

function showPool({ pool, nodes }) {
  const place = byId("pool");
  place.hidden = !pool && !nodes.length;
  if (!place.firstChild) place.append(el("h3", { said: "pool" }), el("div", { class: "memory" }), el("ul", { class: "replicas soft" }));
  const [title, memory, list] = place.children;
  title.hidden = memory.hidden = !pool;
  meter(memory, accelerator(), pool?.gpu_used, pool?.gpu_budget, "@pool");
  meter(memory, "host", pool?.host_used, pool?.host_budget, "@pool");
  list.replaceChildren(
    ...nodes.map(({ name, gpus, gpus_used: taken }) => el("li", { said: [gpus ? "node" : "node.none", name, number(taken, 1), number(gpus, 1)] })),
  );
}

export function show() {
  const state = feed.models;
  const list = byId("cards");
  const known = new Set(state?.models.map(({ id }) => id));
  for (const [id, card] of cards) {
    if (known.has(id)) continue;
    card.node.remove();
    cards.delete(id);
  }
  if (!state?.models.length) {
    if (!list.firstChild) list.append(el("li", { class: "soft", said: "models.none" }));
    return;
  }
  list.querySelector(":scope > :not(.card)")?.remove();
  showPool(state);
  for (const model of state.models) {
    if (!cards.has(model.id)) {
      cards.set(model.id, new Card(model.id));
      list.append(cards.get(model.id).node);
    }
    cards.get(model.id).show(model, model.tier === "lazy" ? state.pool : null, feed.hello?.admin);
  }
}

export function start() {
  feed.addEventListener("models", show);
  // Nothing is told while nothing changes, and time goes on.
  setInterval(show, 5000);
}
