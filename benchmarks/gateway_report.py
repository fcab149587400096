"""What `gateway` found, in tables, and whether it is what is wanted."""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.profile import Profile

_NOISY_CORES = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class Must:
    """What is wanted of the router. CPU in ms a request, with 16 connections; the rest against direct."""

    plain_cpu_ms: float = 0.35
    stream_cpu_ms: float = 1.05
    added_p50_ms: float = 0.6
    pace: float = 0.98
    added_ttft_ms: float = 5.0
    # How much more than the stored ratio --quick lets pass.
    margin: float = 1.3


MUST = Must()


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One load on one side. `cpu_ms`: CPU a reply, by group of processes; gaps are of replies, in the median.

    `span_p50_ms`: from the first token to the end.
    """

    side: str
    kind: str
    connections: int
    round: int
    replies: int
    errors: dict[str, int]
    per_s: float
    gateway_ms: float
    cpu_ms: dict[str, float]
    p50_ms: float
    p99_ms: float
    ttft_p50_ms: float
    span_p50_ms: float
    worst_gap_ms: float
    longest_gap_ms: float
    rss_mib: float
    peak_rss_mib: float
    gateway_cores: float
    other_cores: float


class Table:
    """Medians over the rounds of a cell."""

    def __init__(self, results: Sequence[Result]) -> None:
        self._results = results

    def median(self, side: str, kind: str, connections: int, read: Callable[[Result], float]) -> float:
        """One number of a cell."""
        found = [
            read(result)
            for result in self._results
            if (result.side, result.kind, result.connections) == (side, kind, connections)
        ]
        return statistics.median(found)

    def has(self, kind: str, connections: int) -> bool:
        """Whether the cell was measured."""
        return any((result.kind, result.connections) == (kind, connections) for result in self._results)


def print_report(
    results: Sequence[Result], profiles: Mapping[str, Profile], connections: Sequence[int], how: str
) -> bool:
    """Print it; whether what is wanted holds. `how`: what is to be known of how it was measured."""
    table = Table(results)
    sides = list(dict.fromkeys(result.side for result in results if result.round == 0))
    print("## What the gateway costs\n")
    print(
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()},"
        f" {time.strftime('%Y-%m-%d %H:%M')}; median of {1 + max(result.round for result in results)} rounds.\n{how}"
    )
    print(
        "| request | connections | side | CPU ms a request | requests/s | p50 ms | p99 ms | TTFT p50 ms"
        " | worst gap ms | gateway's cores |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for kind in dict.fromkeys(result.kind for result in results):
        for count in connections:
            for side in sides:
                _row(table, side, kind, count)
    _print_memory(results, sides)
    _print_groups(results)
    for name, profile in profiles.items():
        _print_profile(name, profile)
    return _print_verdicts(table, results)


def _row(table: Table, side: str, kind: str, connections: int) -> None:
    def cell(read: Callable[[Result], float], digits: int) -> str:
        return f"{table.median(side, kind, connections, read):.{digits}f}"

    streams = kind != "plain"
    cells = [
        kind,
        str(connections),
        side,
        "" if side == "direct" else cell(lambda one: one.gateway_ms, 3),
        cell(lambda one: one.per_s, 0 if kind != "paced" else 1),
        cell(lambda one: one.p50_ms, 2),
        cell(lambda one: one.p99_ms, 2),
        cell(lambda one: one.ttft_p50_ms, 2) if streams else "",
        cell(lambda one: one.worst_gap_ms, 2) if streams else "",
        "" if side == "direct" else cell(lambda one: one.gateway_cores, 2),
    ]
    print("|", " | ".join(cells), "|")


def _print_memory(results: Sequence[Result], sides: Sequence[str]) -> None:
    print("\nResident memory of the gateway, MiB at the end (at its peak):")
    for side in sides:
        last = [result for result in results if result.side == side][-1]
        if side != "direct":
            print(f"- {side}: {last.rss_mib:.0f} ({last.peak_rss_mib:.0f})")


def _print_groups(results: Sequence[Result]) -> None:
    """What else ran while the router was loaded, in cores: so that nothing of it hides."""
    print("\nCores used while the router answered, by whom, over all runs (the first line is what is counted):")
    mine = [result for result in results if result.side == "router"]
    for name in dict.fromkeys(name for result in mine for name in result.cpu_ms):
        cores = [result.cpu_ms.get(name, 0.0) * result.per_s / 1000 for result in mine]
        print(f"- {name}: {statistics.median(cores):.3f} (most {max(cores):.3f})")
    others = [result.other_cores for result in results]
    print(f"- everybody else on this machine, in all runs: {statistics.median(others):.3f} (most {max(others):.3f})")


def _print_profile(name: str, profile: Profile) -> None:
    print(f"\n### Where the Router's time goes: {name} at 16 connections ({profile.samples} samples)\n")
    print("Shares of the time in which it held the interpreter lock.\n")
    print("| stage | share |\n|---|---|")
    for stage, share in profile.stages:
        if share >= 0.005:
            print(f"| {stage} | {share:.1%} |")
    print("\n| innermost function | share |\n|---|---|")
    for function, share in profile.functions:
        print(f"| `{function}` | {share:.1%} |")


def _print_verdicts(table: Table, results: Sequence[Result]) -> bool:
    checks: list[tuple[str, float, str, bool]] = []

    def check(what: str, found: float, wanted: float, *, least: bool = False) -> None:
        holds = found >= wanted if least else found <= wanted
        checks.append((what, found, f"{'≥' if least else '≤'} {wanted:g}", holds))

    def added(kind: str, connections: int, read: Callable[[Result], float]) -> float:
        router, direct = (table.median(side, kind, connections, read) for side in ("router", "direct"))
        return router - direct

    if table.has("plain", 16):
        check(
            "plain, 16 connections: CPU ms a request",
            table.median("router", "plain", 16, lambda one: one.gateway_ms),
            MUST.plain_cpu_ms,
        )
        check(
            "stream, 16 connections: CPU ms a request",
            table.median("router", "stream", 16, lambda one: one.gateway_ms),
            MUST.stream_cpu_ms,
        )
    if table.has("plain", 1):
        check("plain, 1 connection: added p50, ms", added("plain", 1, lambda one: one.p50_ms), MUST.added_p50_ms)
    if table.has("paced", 64):
        router, direct = (table.median(side, "paced", 64, lambda one: one.span_p50_ms) for side in ("router", "direct"))
        check("paced, 64 streams: pace against direct", direct / router, MUST.pace, least=True)
        check(
            "paced, 64 streams: added TTFT p50, ms", added("paced", 64, lambda one: one.ttft_p50_ms), MUST.added_ttft_ms
        )
    print("\n| wanted | found | limit | |\n|---|---|---|---|")
    for what, found, limit, holds in checks:
        print(f"| {what} | {found:.3f} | {limit} | {'PASS' if holds else 'FAIL'} |")
    wrong = [f"{result.side}: {what} ({count}x)" for result in results for what, count in result.errors.items()]
    right = sum(result.replies for result in results)
    print(f"\nReplies: {right} right, token by token; {sum(sum(result.errors.values()) for result in results)} wrong.")
    for line in wrong:
        print(f"- {line}")
    noisy = sum(result.other_cores > _NOISY_CORES for result in results)
    if noisy:
        print(f"Noisy: others used more than {_NOISY_CORES} cores in {noisy} of {len(results)} runs.")
    holds = all(check[-1] for check in checks) and not wrong
    print(f"\n**{'PASS' if holds else 'FAIL'}**")
    return holds


def print_quick(found: Mapping[str, Sequence[float]], stored: Mapping[str, float], wrong: Mapping[str, int]) -> bool:
    """Compare ratios with the stored ones; whether none is more than the margin above."""
    holds = not wrong
    for name, values in found.items():
        ratio, limit = statistics.median(values), stored[name] * stored["margin"]
        holds = holds and ratio <= limit
        print(
            f"{name}: CPU of the router over CPU of load and engine without it: {ratio:.2f}"
            f" ({min(values):.2f} to {max(values):.2f}), stored {stored[name]:.2f}, limit {limit:.2f}:"
            f" {'PASS' if ratio <= limit else 'FAIL'}"
        )
    for what, count in wrong.items():
        print(f"wrong reply: {what} ({count}x)")
    return holds
