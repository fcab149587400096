"""`make sim`: the residency policy and others under simulated traces, as a table and, with `--plot`, a picture."""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.residency_sim.engine import Report, Simulation
from benchmarks.residency_sim.policies import POLICIES
from benchmarks.residency_sim.traces import DAY_S, GIB, TRACES, Scene, giants, pool
from serve_app.residency.events import LazyModel, Limits


def limits_of(args: argparse.Namespace, *, sleeps: bool) -> Limits:
    return Limits(
        memory_bytes=int(args.memory_gib * GIB),
        host_bytes=int(args.host_gib * GIB) if sleeps else 0,
        min_residency_s=args.min_residency_s,
        ageing_s=args.ageing_s,
        backoff_s=10.0,
    )


def simulate(name: str, trace: str, scene: Scene, args: argparse.Namespace) -> Report:
    """One policy under one trace."""
    if trace == "pingpong":
        scene = dataclasses.replace(scene, models=giants(scene.replicas + 1))
    contender = POLICIES[name]
    simulation = Simulation(
        scene.models,
        scene.replicas,
        limits_of(args, sleeps=contender.sleeps),
        contender.new,
        idle_timers=contender.idle_timers or math.isfinite(args.idle_unload_s),
        one_at_a_time=contender.one_at_a_time,
    )
    return simulation.run(TRACES[trace](scene))


def table_of(trace: str, reports: dict[str, Report], took_s: dict[str, float]) -> Table:
    arrivals = max(report.arrivals for report in reports.values())
    table = Table(title=f"{trace}: {arrivals} requests", title_justify="left", title_style="bold")
    table.add_column("policy", no_wrap=True)
    for column in (
        "cold starts",
        "wake-ups",
        "hold p50 s",
        "hold p99 s",
        "held p50 s",
        "held p99 s",
        "moved TiB",
        "refused",
        "starved",
        "ran s",
    ):
        table.add_column(column, justify="right")
    for name, report in reports.items():
        table.add_row(
            name,
            str(report.cold_starts),
            str(report.wakes),
            f"{report.hold_s(0.5):.1f}",
            f"{report.hold_s(0.99):.1f}",
            f"{report.held(0.5):.1f}",
            f"{report.held(0.99):.1f}",
            f"{report.moved_bytes / GIB / 1024:.1f}",
            str(report.refused),
            str(report.starved),
            f"{took_s[name]:.1f}",
        )
    return table


def means(trace: str, args: argparse.Namespace) -> Table:
    """Over several days, each with models and requests of its own seed."""
    table = Table(title=f"{trace}: means of seeds {args.seed} to {args.seed + args.seeds - 1}", title_justify="left")
    table.add_column("policy", no_wrap=True)
    for column in ("requests", "cold starts", "wake-ups", "hold p99 s", "refused", "starved"):
        table.add_column(column, justify="right")
    for name in args.policy or POLICIES:
        days = [simulate(name, trace, scene_of(args, args.seed + day), args) for day in range(args.seeds)]
        table.add_row(
            name,
            f"{statistics.fmean(day.arrivals for day in days):.0f}",
            f"{statistics.fmean(day.cold_starts for day in days):.0f}",
            f"{statistics.fmean(day.wakes for day in days):.0f}",
            f"{statistics.fmean(day.hold_s(0.99) for day in days):.1f}",
            f"{statistics.fmean(day.refused for day in days):.1f}",
            f"{statistics.fmean(day.starved for day in days):.2f}",
        )
    return table


def scene_of(args: argparse.Namespace, seed: int) -> Scene:
    models = pool(args.models, seed, args.idle_unload_s)
    return Scene(models, args.replicas, args.days * DAY_S, args.rate * args.replicas, args.skew, seed)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.residency_sim", description=__doc__)
    parser.add_argument("--trace", choices=[*TRACES, "all"], default="all")
    parser.add_argument("--policy", choices=[*POLICIES], action="append", help="may be given again; default: all")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--models", type=int, default=64)
    parser.add_argument("--days", type=float, help="default: 1, less with more than 20 replicas, at least 0.1")
    parser.add_argument("--rate", type=float, default=0.025, help="requests a second for each replica")
    parser.add_argument("--skew", type=float, default=1.0, help="the exponent of Zipf's law")
    parser.add_argument("--memory-gib", type=float, default=74.0, help="of a replica's accelerator, for lazy models")
    parser.add_argument("--host-gib", type=float, default=256.0, help="of a replica's host, for processes and sleepers")
    parser.add_argument("--min-residency-s", type=float, default=20.0)
    parser.add_argument("--ageing-s", type=float, default=60.0)
    parser.add_argument("--idle-unload-s", type=float, default=math.inf, help="ours and LRU; default: never")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="so many, from --seed on: a table of means")
    parser.add_argument("--plot", metavar="FILE", help="write a picture (.svg or .png)")
    args = parser.parse_args(argv)
    if args.days is None:
        args.days = max(0.1, min(1.0, 20 / args.replicas))

    scene = scene_of(args, args.seed)
    models: Sequence[LazyModel] = scene.models
    console = Console(width=150)
    console.print(
        f"{args.replicas} replicas of {args.memory_gib:g} GiB (host {args.host_gib:g} GiB), {args.models} models of "
        f"{sum(model.memory_bytes for model in models) / GIB:.0f} GiB awake and "
        f"{sum(model.host_bytes for model in models) / GIB:.0f} GiB of weights, {args.days:g} days, seed {args.seed}"
    )
    found: dict[str, dict[str, Report]] = {}
    for trace in TRACES if args.trace == "all" else (args.trace,):
        if args.seeds > 1:
            console.print(means(trace, args))
            continue
        reports, took_s = found.setdefault(trace, {}), {}
        for name in args.policy or POLICIES:
            began = time.perf_counter()
            reports[name] = simulate(name, trace, scene, args)
            took_s[name] = time.perf_counter() - began
        console.print(table_of(trace, reports, took_s))
    if args.plot and found:
        from benchmarks.residency_sim.plot import draw

        draw(found, args.plot)
        console.print(f"plot: {args.plot}")


if __name__ == "__main__":
    main()
