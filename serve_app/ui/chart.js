// Small live charts as SVG: lines over the last 15 minutes, and rows of counts.

import { el, svg } from "./dom.js";
import { number, sayIn, write } from "./words.js";

const WIDTH = 300;
const HEIGHT = 70;

// The least of 1, 2, 5, 10, ... that is not below.
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

export class LineChart {
  // `series`: names of the lines, the most telling first; `digits`: of the figures.
  constructor(key, series, digits = 0) {
    this.key = key;
    this.digits = digits;
    this.lines = series.map((name, place) => svg("path", { class: `line line-${place}`, "data-name": name }));
    this.cursor = svg("path", { class: "cursor" });
    this.drawing = svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      svg("path", { class: "axis", d: `M0 ${HEIGHT - 0.5}H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}` }),
      ...this.lines.toReversed(), // the most telling on top
      this.cursor,
    );
    this.top = el("span", { class: "soft" });
    this.figures = series.map((name, place) => {
      const figure = el("span", {});
      const label = series.length > 1 ? [el("i", { class: `dot line-${place}` }), ` ${name} `] : [];
      return { node: el("span", { class: "figure" }, ...label, figure), figure };
    });
    this.node = el(
      "figure",
      { class: "card chart" },
      el("figcaption", { said: key }),
      el("p", { class: "figures" }, ...this.figures.map(({ node }) => node), el("span", { class: "grow" }), this.top),
      this.drawing,
    );
    this.drawing.addEventListener("pointermove", (event) => this.#point(event));
    this.drawing.addEventListener("pointerleave", () => this.#at(null));
  }

  // `rows`: {t, values}, by time; a value of null is a gap.
  draw(rows, from, to) {
    this.rows = rows;
    this.span = [from, to];
    const most = Math.max(0, ...rows.flatMap(({ values }) => values.map((value) => value ?? 0)));
    const top = ceiling(most);
    const x = (t) => (((t - from) / (to - from)) * WIDTH).toFixed(1);
    const y = (value) => (HEIGHT - 1 - (value / top) * (HEIGHT - 4)).toFixed(1);
    this.lines.forEach((line, place) => {
      let path = "";
      let pen = "M";
      for (const { t, values } of rows) {
        const value = values[place];
        if (value === null || value === undefined) {
          pen = "M";
          continue;
        }
        // A lone point is a short dash.
        path += `${pen}${x(t)} ${y(value)}${pen === "M" ? "h1" : ""}`;
        pen = "L";
      }
      line.setAttribute("d", path);
    });
    write(this.top, `↥ ${number(top, this.digits)}`);
    this.#at(null);
    const now = rows.at(-1)?.values.find((value) => value !== null && value !== undefined);
    sayIn(this.drawing, "aria-label", "chart.label", `@${this.key}`, this.#figure(now), this.#figure(most));
  }

  #figure(value) {
    return value === null || value === undefined ? "–" : number(value, this.digits);
  }

  #point(event) {
    const { left, width } = this.drawing.getBoundingClientRect();
    const t = this.span[0] + ((event.clientX - left) / width) * (this.span[1] - this.span[0]);
    const near = this.rows.reduce((best, row) => (!best || Math.abs(row.t - t) < Math.abs(best.t - t) ? row : best), null);
    this.#at(near);
  }

  // The figures of one moment; null: of the newest.
  #at(row) {
    const [from, to] = this.span;
    const x = row ? ((row.t - from) / (to - from)) * WIDTH : 0;
    this.cursor.setAttribute("d", row ? `M${x.toFixed(1)} 0V${HEIGHT}` : "");
    const values = (row ?? this.rows.at(-1))?.values ?? [];
    this.figures.forEach(({ figure }, place) => write(figure, this.#figure(values[place])));
  }
}

export class Counts {
  constructor(key) {
    this.rows = el("ul", { class: "counts" });
    this.node = el("div", { class: "card chart" }, el("h3", { said: key }), this.rows);
  }

  // `counts`: [name, label, count].
  draw(counts) {
    const most = Math.max(1, ...counts.map(([, , count]) => count));
    const sorted = counts.toSorted((a, b) => b[2] - a[2]);
    this.rows.replaceChildren(
      ...sorted.map(([name, label, count]) => {
        const bar = el("meter", { min: 0, max: most, value: count, "aria-label": label });
        return el("li", { class: "bar", "data-name": name }, el("span", { text: label }), bar, el("span", { class: "figure", text: number(count) }));
      }),
    );
    if (!sorted.length) this.rows.replaceChildren(el("li", { class: "soft", said: "chart.none" }));
  }
}
