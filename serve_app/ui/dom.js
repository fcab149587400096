// Nodes, made without markup: whatever a model or a client wrote stays text.

import { say } from "./words.js";

export const byId = (id) => document.getElementById(id);

// `said`: the key of a word, or [key, ...arguments]; `text`: as it is; other names are attributes.
export function el(tag, { said, text, on = {}, ...attributes } = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value === true ? "" : value);
  }
  for (const [name, listener] of Object.entries(on)) node.addEventListener(name, listener);
  if (said) say(node, ...[said].flat());
  if (text !== undefined) node.textContent = text;
  node.append(...children);
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function announce(key, ...args) {
  const node = byId("announce");
  node.textContent = ""; // the same words twice are heard twice
  delete node.dataset.t;
  say(node, key, ...args);
}

// Ask before something that hurts.
export function sure(yes, key, ...args) {
  const dialog = byId("sure-dialog");
  say(byId("sure-text"), key, ...args);
  say(byId("sure-yes"), yes);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    byId("sure-yes").onclick = () => dialog.close("yes");
    byId("sure-no").onclick = () => dialog.close("");
    dialog.onclose = () => resolve(dialog.returnValue === "yes");
  });
}

// A setting that outlives the tab, where the browser lets us keep one.
export function kept(name, value) {
  try {
    if (value !== undefined) localStorage.setItem(`switchyard.${name}`, value);
    return localStorage.getItem(`switchyard.${name}`);
  } catch {
    return value ?? null;
  }
}
