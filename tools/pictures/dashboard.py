"""`make dashboard`: the overview dashboard's own queries, asked of a Prometheus that `make observe` runs, as a picture.

Grafana is in no package that a fresh machine could have; its panels are drawn by matplotlib here, from the same data.
"""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer
from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter

from tools.observe.panels import OVERVIEW, Panel, Query

IMAGE = Path(__file__).resolve().parents[2] / "docs" / "images" / "dashboard.png"
_COLUMNS = 3
_STEP_S = 5
# As Grafana sets `$__rate_interval` where Prometheus scrapes every 5 s.
_RATE_INTERVAL = "20s"
_SIGNS = {"reqps": "{:g}/s", "s": "{:g} s", "percentunit": "{:.0%}", "short": "{:g}"}
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def series(prometheus: str, query: Query, begin: float, end: float) -> list[tuple[str, list[float], list[float]]]:
    """Each series of a query: what it is called, its times in seconds after `begin`, its values (no NaN)."""
    expr = query.expr.replace("$__rate_interval", _RATE_INTERVAL)
    asked = urllib.parse.urlencode({"query": expr, "start": begin, "end": end, "step": _STEP_S})
    with _direct.open(f"{prometheus}/api/v1/query_range?{asked}") as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    named = []
    for each in found:
        labels = each["metric"]
        name = re.sub(r"\{\{(\w+)\}\}", lambda match, labels=labels: labels.get(match[1], ""), query.legend)
        points = [(float(at) - begin, float(value)) for at, value in each["values"] if value != "NaN"]
        named.append((name, [at for at, _ in points], [value for _, value in points]))
    return named


def draw(panel: Panel, axis: Any, found: list[tuple[str, list[float], list[float]]]) -> None:
    """One panel, with time in minutes."""
    for name, times, values in sorted(found):
        axis.plot([at / 60 for at in times], values, label=name or "none", linewidth=1.4)
        if panel.stacked and len(found) == 1:
            axis.fill_between([at / 60 for at in times], values, alpha=0.2)
    axis.set_title(panel.title, loc="left", fontsize=9, fontweight="bold")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _SIGNS.get(panel.unit, "{:g}").format(value)))
    # Room for the legend.
    axis.set_ylim(0, axis.get_ylim()[1] * 1.4)
    axis.tick_params(labelsize=7)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if found:
        axis.legend(fontsize=6, frameon=False, loc="upper left", ncols=2)


def main(
    prometheus: Annotated[str, typer.Option(help="Where it answers.")] = "http://127.0.0.1:9090",
    minutes: Annotated[float, typer.Option(help="So much of the past.")] = 5,
    out: Annotated[Path, typer.Option(help="A PNG file.")] = IMAGE,
) -> None:
    """Draw the overview of the last minutes."""
    end = time.time()
    begin = end - 60 * minutes
    found = [
        (panel, [one for query in panel.queries for one in series(prometheus, query, begin, end)])
        for panel in OVERVIEW.panels
    ]
    shown = [(panel, lines) for panel, lines in found if any(values for _, _, values in lines)]
    if not shown:
        sys.exit(f"{prometheus} knows of no request in the last {minutes:g} minutes: use the service first")
    pyplot.switch_backend("agg")
    rows = -(-len(shown) // _COLUMNS)
    figure, axes = pyplot.subplots(rows, _COLUMNS, figsize=(12, 2.5 * rows), squeeze=False, sharex=True)
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    for axis, (panel, lines) in zip(axes.flat, shown, strict=False):
        draw(panel, axis, lines)
    figure.suptitle(f"{OVERVIEW.title} (minutes)", fontsize=10, x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(out, dpi=90)
    print(f"{out.name}: {out.stat().st_size / 1000:.0f} kB, {len(shown)} panels")


if __name__ == "__main__":
    typer.run(main)
