// What goes through this Router: charts of the last 15 minutes, and the latest requests with their timelines.

import { Counts, LineChart } from "./chart.js";
import { byId, el, svg } from "./dom.js";
import { feed } from "./feed.js";
import { duration, language, named, number, word } from "./words.js";

const SPAN_S = 15 * 60;
const QUANTILES = ["p50", "p90", "p99"];

const each = (name) => ({ [name]: found }) => QUANTILES.map((quantile) => found?.[quantile] ?? null);
const perSecond = (name) => (point) => [(point[name] ?? 0) / feed.stepS];
const share = ({ requests, thinking }) => [requests ? (100 * thinking) / requests : null];
const ONE = [""];
let charts, refused, sources;

const rows = new Map(); // of the latest requests, by request and time
let visible = false;

function added(name) {
  const sum = new Map();
  for (const point of feed.points.values()) {
    for (const [code, count] of Object.entries(point[name] ?? {})) sum.set(code, (sum.get(code) ?? 0) + count);
  }
  return [...sum].filter(([, count]) => count);
}

function draw() {
  if (!visible) return;
  // Without the newest: its step is still running, and its rates would be too low.
  const points = [...feed.points.values()].sort((a, b) => a.t - b.t).slice(0, -1);
  const to = points.at(-1)?.t ?? Date.now() / 1000;
  for (const [chart, values] of charts) {
    chart.draw(points.map((point) => ({ t: point.t, values: values(point) })), to - SPAN_S, to);
  }
  refused.draw(added("refused").map(([code, count]) => [code, code, count]));
  sources.draw(added("sources").map(([source, count]) => [source, named("source", source), count]));
}

const clock = (at) => new Date(at * 1000).toLocaleTimeString(language() === "zh" ? "zh-CN" : "en-GB");

// The parts of a request's way, in ms. A relay with a first token is two: until it came, and from then on.
const parts = ({ steps = [], ttft_ms: first }) =>
  steps.flatMap(({ name, from_ms: from, to_ms: to }) =>
    name === "relay" && first !== null ? [["engine", from, first], ["answer", first, to]] : [[name, from, to]],
  );

function timeline(record) {
  const total = Math.max(record.total_ms, 1);
  const rows = parts(record).map(([name, from, to]) => {
    const width = Math.max(((to - from) / total) * 100, 0.4);
    const x = Math.min((from / total) * 100, 100 - width);
    const bar = svg(
      "svg",
      { viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("path", { d: "M0 3h100v2h-100z", class: "rail" }),
      svg("rect", { x, width, height: 8, class: `part part-${name}` }),
    );
    const words = el("span", { text: named("step", name) });
    return el("li", { class: "bar", "data-name": name }, words, bar, el("span", { text: duration(to - from) }));
  });
  return el("ol", { class: "timeline", "aria-label": word("timeline") }, ...rows);
}

function details({ at: _, steps: __, ...record }) {
  const facts = Object.entries(record).filter(([, value]) => value !== null && value !== "");
  const rows = facts.flatMap(([name, value]) => [el("dt", { class: "mono", text: name }), el("dd", { text: value })]);
  return el("dl", { class: "reasons" }, ...rows);
}

function row(record) {
  const good = record.status < 400 && !record.error;
  const cell = (name, text) => el("span", { class: name, text });
  const node = el(
    "details",
    { class: "record", "data-request": record.request },
    el(
      "summary",
      {},
      cell("soft", clock(record.at)),
      cell(good ? "status good" : "status bad", record.error ? `${record.status} ${record.error}` : String(record.status)),
      cell("model", record.model ?? record.path),
      cell("soft", record.thinking ? word("thinking") : ""),
      cell("figure", record.ttft_ms === null || record.ttft_ms === undefined ? "" : duration(record.ttft_ms)),
      cell("figure", record.completion_tokens ? word("tokens", number(record.completion_tokens)) : ""),
      cell("figure", duration(record.total_ms)),
    ),
  );
  node.addEventListener("toggle", () => {
    if (node.open && node.childElementCount === 1) node.append(timeline(record), details(record));
  });
  return node;
}

function list() {
  if (!visible) return;
  const place = byId("records");
  const wanted = new Map(feed.records.map((record) => [`${record.request} ${record.at}`, record]));
  for (const [id, node] of rows) {
    if (wanted.has(id)) continue;
    node.remove();
    rows.delete(id);
  }
  place.querySelector(":scope > p")?.remove();
  // From the oldest to the newest: each new one goes on top, and those that are there stay where they are.
  for (const [id, record] of [...wanted].reverse()) {
    if (rows.has(id)) continue;
    rows.set(id, row(record));
    place.prepend(rows.get(id));
  }
  if (!rows.size) place.append(el("p", { class: "soft", said: "requests.none" }));
}

export function relabel() {
  for (const node of rows.values()) node.remove();
  rows.clear();
  draw();
  list();
}

// Nothing is drawn while nobody looks.
export function look(seen) {
  visible = seen;
  draw();
  list();
}

export function start() {
  charts = [
    [new LineChart("chart.requests", ONE, 1), perSecond("requests")],
    [new LineChart("chart.ttft", QUANTILES), each("ttft_ms")],
    [new LineChart("chart.tpot", QUANTILES, 1), each("tpot_ms")],
    [new LineChart("chart.tokens", ONE, 1), perSecond("tokens")],
    [new LineChart("chart.thinking", ONE), share],
    [new LineChart("chart.failed", ONE, 1), perSecond("failed")],
  ];
  refused = new Counts("chart.refused");
  sources = new Counts("chart.sources");
  byId("charts").append(...charts.map(([chart]) => chart.node), refused.node, sources.node);
  feed.addEventListener("hello", draw);
  feed.addEventListener("traffic", draw);
  feed.addEventListener("requests", list);
}
