"""benchmarks.residency_sim: nothing is lost in it, and what docs/residency.md claims holds on small traces."""

from __future__ import annotations

import pytest

from benchmarks.residency_sim.engine import Report, Simulation
from benchmarks.residency_sim.policies import POLICIES
from benchmarks.residency_sim.traces import DAY_S, GIB, SIZES, TRACES, Scene, giants, model_of, pool
from serve_app.residency.events import Limits
from serve_app.residency.victims import RESIDENCY_PER_SWAP

HOURS_6 = 6 * 3600.0


def simulate(policy: str, trace: str, *, seconds: float = HOURS_6, seed: int = 1) -> Report:
    models = giants(4) if trace == "pingpong" else pool(24, seed)
    return run(policy, trace, Scene(models, 3, seconds, 0.075, 1.0, seed))


def run(policy: str, trace: str, scene: Scene) -> Report:
    contender = POLICIES[policy]
    limits = Limits(
        memory_bytes=74 * GIB,
        min_residency_s=20.0,
        ageing_s=60.0,
        backoff_s=10.0,
        host_bytes=256 * GIB if contender.sleeps else 0,
    )
    simulation = Simulation(scene.models, scene.replicas, limits, contender.new, idle_timers=contender.idle_timers)
    return simulation.run(TRACES[trace](scene))


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_served_or_refused(policy: str, trace: str) -> None:
    report = simulate(policy, trace)
    assert report.arrivals > 100
    assert report.served + report.refused == report.arrivals


@pytest.mark.parametrize("trace", ["zipf", "diurnal", "bursts", "pingpong"])
def test_nobody_starves(trace: str) -> None:
    assert simulate("ours", trace).starved == 0


@pytest.mark.parametrize("trace", ["zipf", "diurnal"])
def test_a_third_fewer_cold_starts_and_half_the_hold_of_lru_at_the_same_memory(trace: str) -> None:
    # Of a day; in fewer hours what is loaded for the first time, which nobody can avoid, would be most.
    ours, lru = simulate("ours", trace, seconds=DAY_S), simulate("LRU", trace, seconds=DAY_S)
    assert ours.cold_starts <= 0.7 * lru.cold_starts
    assert ours.hold_s(0.99) <= 0.5 * lru.hold_s(0.99)


def test_ping_pong_swaps_no_faster_than_minimum_residency_allows() -> None:
    large = SIZES[-1]
    scene = Scene(giants(2), 1, HOURS_6, 0.1, 1.0, 1)
    report = run("ours", "pingpong", scene)
    assert report.most_bring_ups <= HOURS_6 / (RESIDENCY_PER_SWAP * large.wake_s + large.wake_s) + 2
    assert report.refused == 0


def test_a_large_model_gets_room_where_many_small_ones_would_leave_too_much_behind_asleep() -> None:
    # All of them asleep keep 16 x 0.8 GiB, and the large one needs all but 7 GiB: some must end, though all are awake.
    small = [model_of(SIZES[0], number) for number in range(16)]
    scene = Scene([*small, model_of(SIZES[-1], 16)], 1, HOURS_6, 0.1, 0.0, 1)
    report = run("ours", "zipf", scene)
    assert report.starved == report.refused == 0


def test_the_same_seed_gives_the_same_run() -> None:
    assert simulate("ours", "diurnal") == simulate("ours", "diurnal")
    assert simulate("ours", "diurnal") != simulate("ours", "diurnal", seed=2)
