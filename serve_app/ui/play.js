// The playground: a conversation with the models, and every setting of a request that the router reads.

import { Answer } from "./answer.js";
import { asCode } from "./code.js";
import { announce, byId, el } from "./dom.js";
import { feed } from "./feed.js";
import { number, say, word, write } from "./words.js";

const BUDGETS = [0, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768];

let turns = [];
let shown = null; // the request in the code dialog
let code = "curl";

const thinking = () => document.querySelector('input[name="thinking"]:checked').value;
const budget = () => BUDGETS[byId("budget").value];

// What a person must put right before it can be sent.
class Wrong extends Error {}

function json(id, fits, otherwise) {
  const text = byId(id).value.trim();
  if (!text) return undefined;
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    throw new Wrong(word("error.json", word(id)));
  }
  if (!fits(value)) throw new Wrong(word(otherwise, word(id)));
  return value;
}

function amount(id, least, most) {
  const field = byId(id);
  if (!field.value && !field.validity.badInput) return undefined;
  const value = Number(field.value);
  if (field.validity.badInput || value < least || value > most) {
    throw new Wrong(word("error.range", word(id), least, most === Infinity ? "∞" : most));
  }
  return value;
}

// The fields of a request as the form says them. Throws `Wrong`.
function settings(mode) {
  const body = { model: byId("model").value };
  if (mode !== "auto") body.chat_template_kwargs = { enable_thinking: mode === "on" };
  if (mode === "on" && budget()) body.thinking_token_budget = budget();
  const temperature = amount("temperature", 0, 2);
  const most = amount("max", 1, Infinity);
  if (temperature !== undefined) body.temperature = temperature;
  if (most !== undefined) body.max_tokens = most;
  const tools = json("tools", Array.isArray, "error.array");
  if (tools) body.tools = tools;
  const schema = json("schema", (value) => value && typeof value === "object" && !Array.isArray(value), "error.object");
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  return body;
}

function history() {
  const system = byId("system").value.trim();
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const { said, answers, kept } of turns) {
    const message = answers[kept].message();
    if (message) messages.push(...said, message); // what was never answered is not part of it
  }
  return messages;
}

function request(said, mode) {
  return { ...settings(mode), messages: [...history(), ...said], stream: true, stream_options: { include_usage: true } };
}

function complain(error) {
  const node = byId("wrong");
  node.hidden = !error;
  if (error && !(error instanceof Wrong)) throw error;
  write(node, error?.message ?? "");
}

function busy() {
  const running = turns.some(({ answers }) => answers.some(({ node }) => node.dataset.state === "running"));
  byId("stop").hidden = !running;
  byId("send").disabled = running;
  return running;
}

function send(said, text) {
  if (busy()) return false;
  const sides = byId("compare").checked ? ["on", "off"] : [""];
  let answers;
  try {
    answers = sides.map((side) => new Answer(request(said, side || thinking()), side));
    complain(null);
  } catch (error) {
    complain(error);
    return false;
  }
  byId("empty")?.remove();
  const turn = { said, answers, kept: 0 };
  turns.push(turn);
  turn.node = el(
    "div",
    { class: "turn" },
    el("div", { class: "you" }, el("h3", { said: "you" }), el("div", { class: "text", dir: "auto", text })),
    el("div", { class: answers.length > 1 ? "answers two" : "answers" }, ...answers.map(({ node }) => node)),
  );
  for (const answer of answers) {
    answer.node.addEventListener("ended", () => ended(turn, answer));
    answer.node.append(el("button", { type: "button", class: "small", said: "code", on: { click: () => showCode(answer.body) } }));
  }
  if (answers.length > 1) choices(turn);
  const region = byId("turns");
  region.append(turn.node);
  region.scrollTop = region.scrollHeight;
  for (const answer of answers) answer.run();
  busy();
  return true;
}

// With which of two answers the conversation goes on.
function choices(turn) {
  const buttons = turn.answers.map((answer, place) => {
    const choose = () => {
      turn.kept = place;
      buttons.forEach((button, each) => {
        say(button, each === place ? "side.kept" : "side.keep");
        button.setAttribute("aria-pressed", String(each === place));
      });
    };
    const button = el("button", { type: "button", class: "small", on: { click: choose } });
    answer.node.append(button);
    return button;
  });
  buttons[0].click();
}

function ended(turn, answer) {
  busy();
  if (answer.finish === "tool_calls" || answer.calls.length) results(turn, answer);
}

// The person is the tool: what it gave goes back to the model.
function results(turn, answer) {
  const fields = answer.calls.map(({ name }) => {
    const field = el("textarea", { rows: 1, class: "mono", dir: "auto" });
    return [el("label", {}, el("span", { said: ["tool.result", name] }), field), field];
  });
  const give = el("button", { type: "button", class: "small", said: "tool.give" });
  const form = el("div", { class: "results" }, ...fields.map(([label]) => label), give);
  give.addEventListener("click", () => {
    turn.kept = turn.answers.indexOf(answer);
    const said = fields.map(([, field], place) => ({ role: "tool", tool_call_id: answer.calls[place].id, content: field.value }));
    const text = said.map(({ content }, place) => `${answer.calls[place].name}: ${content}`).join("\n");
    if (send(said, text)) form.remove();
  });
  answer.called.append(form);
}

function ask() {
  const field = byId("prompt");
  const text = field.value.trim();
  if (text && send([{ role: "user", content: text }], text)) field.value = "";
}

function fresh() {
  for (const { answers } of turns) for (const answer of answers) answer.stop();
  turns = [];
  byId("turns").replaceChildren(el("p", { id: "empty", class: "soft", said: "empty" }));
  complain(null);
  busy();
  byId("prompt").focus();
}

function showCode(body) {
  shown = body;
  byId("code-text").textContent = asCode(shown, code);
  for (const button of document.querySelectorAll("[data-code]")) {
    button.setAttribute("aria-pressed", String(button.dataset.code === code));
  }
  if (!byId("code-dialog").open) byId("code-dialog").showModal();
}

function current() {
  const text = byId("prompt").value.trim();
  try {
    complain(null);
    showCode(request(text ? [{ role: "user", content: text }] : [], byId("compare").checked ? "on" : thinking()));
  } catch (error) {
    complain(error);
  }
}

function budgetWords() {
  byId("budget").disabled = thinking() !== "on";
  const words = budget() ? number(budget()) : word("budget.none");
  byId("budget-now").textContent = words;
  byId("budget").setAttribute("aria-valuetext", words);
}

function offer({ models }) {
  const select = byId("model");
  const chosen = select.value;
  select.replaceChildren(el("option", { value: "auto", said: "model.auto" }), ...models.map((id) => el("option", { value: id, text: id })));
  select.value = ["auto", ...models].includes(chosen) ? chosen : "auto";
}

export function relabel() {
  budgetWords();
  for (const { answers } of turns) for (const answer of answers) answer.explainAgain();
}

export function start() {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  byId("form").addEventListener("submit", (event) => event.preventDefault());
  byId("prompt").addEventListener("keydown", (event) => {
    // While an input method composes, Enter is its own.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    ask();
  });
  byId("stop").addEventListener("click", () => {
    for (const answer of turns.at(-1).answers) answer.stop();
  });
  byId("fresh").addEventListener("click", fresh);
  byId("code").addEventListener("click", current);
  byId("code-close").addEventListener("click", () => byId("code-dialog").close());
  byId("code-copy").addEventListener("click", async () => {
    await navigator.clipboard?.writeText(byId("code-text").textContent);
    announce("copied");
  });
  for (const button of document.querySelectorAll("[data-code]")) {
    button.addEventListener("click", () => {
      code = button.dataset.code;
      showCode(shown);
    });
  }
  byId("budget").addEventListener("input", budgetWords);
  for (const radio of document.querySelectorAll('input[name="thinking"]')) radio.addEventListener("change", budgetWords);
  feed.addEventListener("hello", ({ detail }) => offer(detail));
  feed.addEventListener("requests", ({ detail }) => {
    const news = new Set(detail.requests.map(({ request }) => request));
    for (const { answers } of turns) for (const answer of answers) if (news.has(answer.request)) answer.explainAgain();
  });
  // On a small screen the conversation comes first.
  if (matchMedia("(max-width: 52rem)").matches) byId("settings").open = false;
  fresh();
  budgetWords();
}
