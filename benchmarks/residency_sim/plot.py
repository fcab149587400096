"""Draws what a run found: cold starts, and how long requests were held, for each trace and policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from matplotlib import pyplot

from benchmarks.residency_sim.engine import Report


def draw(found: Mapping[str, Mapping[str, Report]], path: str) -> None:
    """Two rows of bars, a column for each trace; cold starts on a logarithmic scale."""
    pyplot.switch_backend("agg")
    pyplot.rcParams["svg.hashsalt"] = "residency"  # the same run gives the same file
    rows: tuple[tuple[str, Callable[[Report], float], bool], ...] = (
        ("cold starts", lambda report: report.cold_starts, True),
        ("hold p99, seconds", lambda report: report.hold_s(0.99), False),
    )
    figure, axes = pyplot.subplots(2, len(found), figsize=(2.6 * len(found) + 2, 6), squeeze=False, sharey="row")
    names = list(next(iter(found.values())))
    colours = pyplot.get_cmap("tab10").colors
    for column, (trace, reports) in enumerate(found.items()):
        for row, (label, measure, logarithmic) in enumerate(rows):
            axis = axes[row][column]
            for place, name in enumerate(names):
                bar = axis.bar(place, measure(reports[name]), color=colours[place], label=name)
                axis.bar_label(bar, fmt="%.0f", fontsize=7)
            axis.set_xticks([])
            axis.spines[["top", "right"]].set_visible(False)
            if logarithmic:
                axis.set_yscale("log")
            if not row:
                axis.set_title(trace)
            if not column:
                axis.set_ylabel(label)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=3, loc="lower center", frameon=False)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
    pyplot.close(figure)
