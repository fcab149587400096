// The one connection on which the service says what happens. It is made again whenever it is lost.

import { call, events, Fault } from "./api.js";

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 15_000;
// The service says something every 15 s.
const SILENCE_MS = 40_000;
const MOST_RECORDS = 200;
const KEPT_S = 15 * 60;

class Feed extends EventTarget {
  // link: connecting, live, lost, refused, locked. `fault`: why.
  state = { link: "connecting", fault: null };
  hello = null;
  models = null;
  stepS = 5;
  points = new Map();
  records = [];
  #heard = 0;
  #pause = FIRST_PAUSE_MS;
  #control = null;
  #timer = 0;

  connect() {
    clearTimeout(this.#timer);
    this.#control?.abort();
    this.#control = new AbortController();
    this.#run(this.#control);
  }

  // Seconds since `models` was heard.
  age = () => (performance.now() - this.#heard) / 1000;

  async #run(control) {
    let watch = 0;
    const alive = () => {
      clearTimeout(watch);
      watch = setTimeout(() => control.abort(new Fault(0)), SILENCE_MS);
    };
    try {
      alive();
      const response = await call("v1/router/events", { signal: control.signal });
      for await (const { event, data } of events(response)) {
        alive();
        if (event === "bye") break;
        if (data) this.#take(event, JSON.parse(data));
      }
      this.#lost(control, null);
    } catch (error) {
      this.#lost(control, error);
    } finally {
      clearTimeout(watch);
    }
  }

  #take(event, data) {
    if (event === "hello") {
      this.hello = data;
      this.points.clear();
      this.records = [];
      this.#pause = FIRST_PAUSE_MS;
      this.#say("live");
    } else if (event === "models") {
      this.models = data;
      this.#heard = performance.now();
    } else if (event === "traffic") {
      this.stepS = data.step_s;
      for (const point of data.points) this.points.set(point.t, point);
      const oldest = Math.max(...this.points.keys()) - KEPT_S;
      for (const t of this.points.keys()) if (t < oldest) this.points.delete(t);
    } else if (event === "requests") {
      const known = new Set(this.records.map(({ request, at }) => `${request} ${at}`));
      const fresh = data.requests.filter(({ request, at }) => !known.has(`${request} ${at}`));
      this.records = [...fresh, ...this.records].sort((a, b) => b.at - a.at).slice(0, MOST_RECORDS);
    }
    this.dispatchEvent(new CustomEvent(event, { detail: data }));
  }

  #lost(control, error) {
    if (control !== this.#control) return; // another one took its place
    if (error?.status === 401) return this.#say("locked", error);
    // Many pages that lost one server must not come back in one moment.
    const pause = Math.max(this.#pause * (0.75 + Math.random() / 2), (error?.again ?? 0) * 1000);
    this.#pause = Math.min(this.#pause * 2, LONGEST_PAUSE_MS);
    this.#timer = setTimeout(() => this.connect(), pause);
    this.#say(error?.status ? "refused" : "lost", error);
  }

  #say(link, fault = null) {
    this.state = { link, fault };
    this.dispatchEvent(new Event("state"));
  }
}

export const feed = new Feed();
