// One answer as it comes: its text, its reasoning in a panel that folds, its tool calls, and why it is as it is.

import { call, events, Fault, faultIn } from "./api.js";
import { announce, el } from "./dom.js";
import { feed } from "./feed.js";
import { duration, named, number, say, word, write } from "./words.js";

// Writes what has come once a frame, whatever the pace of the tokens; in pieces, so that a long text stays cheap.
class Paper {
  static PIECE = 2000;
  #waiting = "";
  #frame = 0;
  #last = null;
  text = "";

  constructor(node) {
    this.node = node;
  }

  add(text) {
    this.text += text;
    this.#waiting += text;
    this.#frame ||= requestAnimationFrame(() => this.flush());
  }

  flush() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    if (!this.#waiting) return;
    const region = this.node.closest("#turns");
    const below = region && region.scrollHeight - region.scrollTop - region.clientHeight;
    if (!this.#last || this.#last.length > Paper.PIECE) {
      this.#last = document.createTextNode("");
      this.node.append(this.#last);
    }
    this.#last.appendData(this.#waiting);
    this.#waiting = "";
    // Whoever has scrolled up to read stays there.
    if (region && below < 60) region.scrollTop = region.scrollHeight;
  }
}

export class Answer {
  // `body`: the request; `side`: on or off where two are compared.
  constructor(body, side = "") {
    this.body = body;
    this.calls = [];
    this.finish = "";
    this.fault = null;
    this.usage = null;
    this.headers = new Headers();
    this.#control = new AbortController();
    this.state = say(el("p", { class: "soft state" }), "state.sending");
    this.panel = el("details", { class: "reasoning", hidden: true, open: true });
    this.panelTitle = el("summary", { said: "reasoning" });
    const thought = el("div", { class: "text", dir: "auto" });
    this.panel.append(this.panelTitle, thought);
    const content = el("div", { class: "text content", dir: "auto" });
    this.thought = new Paper(thought);
    this.content = new Paper(content);
    this.called = el("div", { class: "calls" });
    this.wrong = el("p", { class: "error", role: "alert", hidden: true });
    this.reasons = el("dl", { class: "reasons" });
    this.summary = el("summary", { said: "why" });
    this.why = el("details", { class: "why", hidden: true }, this.summary, this.reasons);
    this.node = el(
      "article",
      { class: "answer", "data-state": "running" },
      ...(side ? [el("h3", { said: `side.${side}` })] : []),
      this.panel,
      content,
      this.called,
      this.state,
      this.wrong,
      this.why,
    );
  }

  #control;
  #sentAt = 0;
  #firstAt = 0;
  #lastAt = 0;
  #pieces = 0;
  #thoughts = 0;
  #loading = false;

  stop() {
    this.#control.abort();
  }

  async run() {
    this.#sentAt = performance.now();
    try {
      const response = await call("v1/chat/completions", { body: this.body, signal: this.#control.signal });
      this.headers = response.headers;
      this.#explain();
      for await (const { data, comment } of events(response)) {
        if (comment) this.#waits(comment);
        if (data === "[DONE]") break;
        if (data) this.#take(JSON.parse(data));
      }
      if (!this.finish) throw new Fault(0, "", "cut");
    } catch (error) {
      if (error.name === "AbortError") this.finish = "stopped";
      else this.fault = error instanceof Fault ? error : new Fault(500, String(error.message ?? error));
    }
    this.#end();
  }

  #waits(comment) {
    if (this.#firstAt) return;
    this.#loading ||= comment.startsWith("loading");
    say(this.state, "state.loading", comment.replace(/^loading /, ""));
  }

  #take(chunk) {
    if (chunk.error) throw faultIn(chunk.error);
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { content, reasoning, reasoning_content: older, tool_calls: calls } = choice.delta ?? {};
    const thought = reasoning ?? older;
    if (content || thought || calls) {
      this.#lastAt = performance.now();
      this.#pieces += 1;
      if (!this.#firstAt) {
        this.#firstAt = this.#lastAt;
        this.state.hidden = true;
      }
    }
    if (thought) {
      this.panel.hidden = false;
      this.#thoughts += 1;
      this.thought.add(thought);
      say(this.panelTitle, "reasoning.size", number(this.#thoughts));
    }
    if (content) {
      // The thought is over: what was asked for comes into view. Whoever opens it again keeps it open.
      if (!this.content.text.trim() && content.trim()) this.panel.open = false;
      this.content.add(content);
    }
    for (const each of calls ?? []) this.#call(each);
    if (choice.finish_reason) this.finish = choice.finish_reason;
  }

  #call({ index = 0, id, function: asked = {} }) {
    if (!this.calls[index]) {
      const text = el("pre", { class: "text mono" });
      const title = el("h4", {});
      this.called.append(title, text);
      this.calls[index] = { id: id ?? `call-${index}`, name: "", paper: new Paper(text), title };
    }
    const found = this.calls[index];
    if (id) found.id = id;
    if (asked.name) say(found.title, "tool.call", (found.name += asked.name));
    if (asked.arguments) found.paper.add(asked.arguments);
  }

  #end() {
    this.content.flush();
    this.thought.flush();
    for (const each of this.calls) each?.paper.flush();
    const reason = { stopped: "state.stopped", length: "state.length" }[this.finish];
    this.state.hidden = !reason;
    if (reason) say(this.state, reason);
    if (this.fault) {
      this.wrong.hidden = false;
      write(this.wrong, this.fault.words);
    }
    if (!this.content.text) this.panel.open = true;
    this.#explain();
    this.node.dataset.state = this.fault ? "failed" : this.finish === "stopped" ? "stopped" : "done";
    announce(this.fault ? this.fault.title : (reason ?? "state.done"));
    this.node.dispatchEvent(new CustomEvent("ended"));
  }

  // What the next request says of this answer; nothing where there is nothing to say.
  message() {
    if (!this.content.text && !this.calls.length) return null;
    const message = { role: "assistant", content: this.content.text };
    if (this.calls.length) {
      message.tool_calls = this.calls.map(({ id, name, paper }) => ({
        id,
        type: "function",
        function: { name, arguments: paper.text },
      }));
    }
    return message;
  }

  // After a switch of the language, and when the audit's record of it has come.
  explainAgain() {
    this.#explain();
    if (this.fault) write(this.wrong, this.fault.words);
  }

  get request() {
    return this.headers.get("x-request-id") ?? "";
  }

  #explain() {
    const said = (name) => this.headers.get(`x-router-${name}`);
    const record = this.request ? feed.records.find(({ request }) => request === this.request) : null;
    const rows = [];
    const row = (key, value) => value && rows.push([key, value]);
    const chosen = (value, source) => `${value} · ${named("source", source)}`;
    const model = said("model");
    if (model) {
      row("model", chosen(model, said("model-source")));
      row("thinking", chosen(word(said("thinking")), said("thinking-source")));
      row("why.budget", said("budget") && word("tokens", number(said("budget"))));
      row("why.score", said("score") && chosen(said("score"), said("scorer")));
      for (const name of ["rule", "fallback", "warning", "degraded"]) row(`why.${name}`, said(name));
    }
    const cold = Number(said("cold-start-ms")) || record?.load_ms || 0;
    row("why.cold", cold ? duration(cold) : this.#loading && this.#firstAt ? duration(this.#firstAt - this.#sentAt) : "");
    row("queued", record?.queue_ms && duration(record.queue_ms));
    row("why.decision", said("decision-ms") && duration(Number(said("decision-ms"))));
    const ttft = this.#firstAt ? duration(this.#firstAt - this.#sentAt) : "";
    row("why.ttft", ttft);
    const details = this.usage?.completion_tokens_details;
    const tokens = this.usage?.completion_tokens ?? this.#pieces;
    const seconds = (this.#lastAt - this.#firstAt) / 1000;
    const pace = tokens > 1 && seconds > 0 ? number((tokens - 1) / seconds, 1) : "";
    if (this.node.dataset.state !== "running" || this.finish || this.fault) {
      row("why.tps", pace);
      if (this.usage) {
        const thought = details?.reasoning_tokens ?? 0;
        const cached = this.usage.prompt_tokens_details?.cached_tokens ?? record?.cached_tokens ?? 0;
        const split = [this.usage.prompt_tokens, cached, thought, Math.max(0, tokens - thought)].map((count) => number(count));
        row("why.tokens", word("why.tokens.split", ...split));
        if (thought) say(this.panelTitle, "reasoning.size", number(thought));
      }
      row("why.finish", this.finish);
    }
    row("why.steps", record?.steps?.map(({ name, from_ms: from, to_ms: to }) => `${named("step", name)} ${duration(to - from)}`).join(", "));
    row("why.request", this.request);
    row("why.policy", said("policy"));
    this.why.hidden = !rows.length;
    this.reasons.replaceChildren(...rows.flatMap(([key, value]) => [el("dt", { said: key }), el("dd", { text: value })]));
    const short = [model, model && `${word("thinking")}: ${word(said("thinking"))}`, ttft];
    if (pace && this.finish) short.push(`${pace} ${word("why.tps")}`);
    if (this.usage) short.push(word("tokens", number(tokens)));
    delete this.summary.dataset.t;
    this.summary.textContent = [word("why"), ...short.filter(Boolean)].join(" · ");
  }
}
