// Calls of the service's own API, below whatever path stands before it.

import { word } from "./words.js";

const BASE = new URL("../", import.meta.url);
const NAME = "switchyard.key";
const WORDS = new Set([401, 403, 404, 429, 503]);

let given = "";
try {
  given = sessionStorage.getItem(NAME) ?? "";
} catch {
  // No storage: the key lives as long as the page.
}

export const base = () => BASE.href.replace(/\/$/, "");
export const key = () => given;

export function useKey(value) {
  given = value;
  try {
    if (value) sessionStorage.setItem(NAME, value);
    else sessionStorage.removeItem(NAME);
  } catch {
    // As above.
  }
}

// What went wrong, for a person: our words, and what the API said. `status` 0: it did not answer.
export class Fault extends Error {
  constructor(status, message = "", code = "", again = 0) {
    super(message);
    Object.assign(this, { status, code, again });
  }

  get title() {
    if (!this.status) return this.code === "cut" ? "error.cut" : "error.network";
    if (WORDS.has(this.status)) return `error.${this.status}`;
    return this.status < 500 ? "error.request" : "error.other";
  }

  get words() {
    const again = this.again ? ` ${word("error.again", this.again)}` : "";
    return `${word(this.title)}${this.message ? `: ${this.message}` : ""}${this.code ? ` (${this.code})` : ""}${again}`;
  }
}

export const faultIn = (error, status = 500) =>
  new Fault(Number.isInteger(error.code) ? error.code : status, error.message, error.code ?? error.type ?? "");

async function faultOf(response) {
  const again = Number(response.headers.get("retry-after")) || 0;
  try {
    const { error } = await response.json();
    return new Fault(response.status, error.message, error.code ?? "", again);
  } catch {
    return new Fault(response.status, response.statusText, "", again);
  }
}

// The answer, if it is a good one. Throws `Fault`, or an `AbortError` where `signal` says so.
export async function call(path, { body, method = body ? "POST" : "GET", signal } = {}) {
  const headers = {};
  if (given) headers.authorization = `Bearer ${given}`;
  if (body) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, BASE), { method, headers, signal, body: body && JSON.stringify(body), cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    // A key that is no header's text never leaves the browser.
    if (given && /[^\x21-\x7e]/.test(given)) throw new Fault(401, "", "invalid_api_key");
    throw new Fault(0);
  }
  if (!response.ok) throw await faultOf(response);
  return response;
}

// The events of a stream: {event, data}, and comments as {comment}. Throws `Fault` where it breaks off.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new Fault(0, "", "cut");
      }
      if (part.done) return;
      const blocks = (rest + part.value.replaceAll("\r", "")).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) yield parsed(block);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parsed(block) {
  const found = { event: "message", data: "", comment: "" };
  for (const line of block.split("\n")) {
    const at = line.indexOf(":");
    const name = at < 0 ? line : line.slice(0, at);
    const value = at < 0 ? "" : line.slice(at + 1).replace(/^ /, "");
    if (name === "") found.comment = value;
    else if (name === "event") found.event = value;
    else if (name === "data") found.data += (found.data ? "\n" : "") + value;
  }
  return found;
}
