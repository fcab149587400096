"""PURE. The models of a simulated pool, and who asks for which of them when. Everything follows from the seed."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence

from serve_app.residency.events import LazyModel

GIB = 2**30
DAY_S = 86_400.0
# A CUDA context and what vLLM keeps beside weights and cache; what one engine's processes take of the host.
_ASLEEP_BYTES = int(0.8 * GIB)
_PROCESS_BYTES = GIB


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """One kind of model: bf16 weights, memory with cache and context while awake, seconds to load and to wake.

    Loads and level-1 wakes from the vLLM team's measurements (blog.vllm.ai, 2025-10-26): a wake takes 0.3 s (0.6B) to
    3 s (30B), a cold start up to 60 s; what lies between is interpolated. `share`: how many of a pool are of this kind.
    """

    name: str
    weights_gib: float
    memory_gib: float
    load_s: float
    wake_s: float
    share: float


SIZES = (
    Size("0.6b", 1.2, 4, 15, 0.3, 0.15),
    Size("1.7b", 3.4, 7, 20, 0.5, 0.20),
    Size("4b", 8, 12, 26, 0.8, 0.25),
    Size("8b", 16, 21, 34, 1.2, 0.20),
    Size("14b", 29, 35, 45, 1.8, 0.12),
    Size("32b", 62, 67, 60, 3.0, 0.08),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it comes, for which model (an index), and how long the engine works at it. Seconds."""

    at_s: float
    model: int
    service_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Scene:
    """What a trace is made for: so many models and replicas, so many seconds, so many requests a second in all."""

    models: Sequence[LazyModel]
    replicas: int
    duration_s: float
    rate: float
    skew: float
    seed: int


Trace = Callable[[Scene], Iterator[Arrival]]


def pool(count: int, seed: int, idle_unload_s: float = math.inf) -> list[LazyModel]:
    """So many models of mixed sizes; size and popularity (the index, the most popular first) are independent."""
    rng = random.Random(seed)
    sizes = rng.choices(SIZES, weights=[size.share for size in SIZES], k=count)
    return [model_of(size, number, idle_unload_s) for number, size in enumerate(sizes)]


def giants(count: int) -> list[LazyModel]:
    """So many models of the largest size, of which no two fit together."""
    return [model_of(SIZES[-1], number) for number in range(count)]


def model_of(size: Size, number: int, idle_unload_s: float = math.inf) -> LazyModel:
    return LazyModel(
        id=f"{size.name}-{number}",
        memory_bytes=int(size.memory_gib * GIB),
        priority=0,
        idle_unload_s=idle_unload_s,
        sleeps=True,
        asleep_bytes=_ASLEEP_BYTES,
        host_bytes=int(size.weights_gib * GIB),
        process_bytes=_PROCESS_BYTES,
        load_s=size.load_s,
        wake_s=size.wake_s,
    )


def zipf(scene: Scene) -> Iterator[Arrival]:
    """Independent requests, Poisson in time, Zipf in popularity."""
    rng = random.Random(scene.seed)
    pick = _popular(scene, rng)
    return (Arrival(at, pick(), _service_s(rng)) for at in _poisson(rng, scene.rate, scene.duration_s))


def bursts(scene: Scene) -> Iterator[Arrival]:
    """Agents and batch jobs: runs of about 20 requests to one model, seconds apart; the model by Zipf."""
    rng = random.Random(scene.seed)
    pick = _popular(scene, rng)
    length, gap_s = 20, 4.0

    def runs() -> Iterator[list[Arrival]]:
        for start in _poisson(rng, scene.rate / length, scene.duration_s):
            at, model = start, pick()
            run: list[Arrival] = []
            while not run or rng.random() > 1 / length:
                run.append(Arrival(at, model, _service_s(rng)))
                at += rng.expovariate(1 / gap_s)
            yield run

    return _merged(runs(), scene.duration_s)


def diurnal(scene: Scene) -> Iterator[Arrival]:
    """Days: the load swings by a factor of nine, and each model has the hours in which it is asked for."""
    rng = random.Random(scene.seed)
    weights = _zipf_weights(scene)
    noon = [rng.random() for _ in weights]
    hours = 24
    tables = []
    for hour in range(hours):
        at_hour = [w * (0.02 + max(0.0, _wave(hour / hours - n))) for w, n in zip(weights, noon, strict=True)]
        tables.append(list(itertools.accumulate(at_hour)))
    indexes = range(len(weights))
    for at in _poisson(rng, 1.8 * scene.rate, scene.duration_s):
        day = at / DAY_S % 1
        if rng.random() * 1.8 < 1 + 0.8 * _wave(day - 0.6):
            model = rng.choices(indexes, cum_weights=tables[int(day * hours)])[0]
            yield Arrival(at, model, _service_s(rng))


def pingpong(scene: Scene) -> Iterator[Arrival]:
    """Adversarial: models that fill a GPU each (`giants`), one more than there are replicas, all in turn."""
    rng = random.Random(scene.seed)
    turn = itertools.cycle(range(scene.replicas + 1))
    gap_s = 10.0 / scene.replicas
    at = 0.0
    while at < scene.duration_s:
        yield Arrival(at, next(turn), rng.uniform(0.5, 2.0))
        at += gap_s


def scans(scene: Scene) -> Iterator[Arrival]:
    """Zipf, and every six hours somebody tries each model once, as health checks and comparisons do."""
    rng = random.Random(scene.seed + 1)
    gap_s = min(20.0 / scene.replicas, 0.5 * 21_600 / len(scene.models))

    def scan(start: float) -> list[Arrival]:
        order = rng.sample(range(len(scene.models)), len(scene.models))
        return [Arrival(start + number * gap_s, model, 1.0) for number, model in enumerate(order)]

    scan_runs = [scan(start) for start in _every(21_600.0, scene.duration_s)]
    return _merged(_by_start([*scan_runs], zipf(scene)), scene.duration_s)


TRACES: dict[str, Trace] = {
    "zipf": zipf,
    "diurnal": diurnal,
    "bursts": bursts,
    "scans": scans,
    "pingpong": pingpong,
}


def _wave(phase: float) -> float:
    return math.cos(2 * math.pi * phase)


def _zipf_weights(scene: Scene) -> list[float]:
    return [(rank + 1) ** -scene.skew for rank in range(len(scene.models))]


def _popular(scene: Scene, rng: random.Random) -> Callable[[], int]:
    cumulative, indexes = list(itertools.accumulate(_zipf_weights(scene))), range(len(scene.models))
    return lambda: rng.choices(indexes, cum_weights=cumulative)[0]


def _poisson(rng: random.Random, rate: float, until_s: float) -> Iterator[float]:
    at = rng.expovariate(rate)
    while at < until_s:
        yield at
        at += rng.expovariate(rate)


def _service_s(rng: random.Random) -> float:
    """Half of the answers take less than 5 s, one of a hundred more than 32 s, none more than 50 s."""
    return min(50.0, rng.lognormvariate(math.log(5.0), 0.8))


def _every(period_s: float, until_s: float) -> Iterator[float]:
    start = period_s / 2
    while start < until_s:
        yield start
        start += period_s


def _by_start(runs: list[list[Arrival]], single: Iterator[Arrival]) -> Iterator[list[Arrival]]:
    yield from runs
    for arrival in single:
        yield [arrival]


def _merged(runs: Iterator[list[Arrival]], until_s: float) -> Iterator[Arrival]:
    arrivals = [arrival for run in runs for arrival in run if arrival.at_s < until_s]
    arrivals.sort(key=lambda arrival: (arrival.at_s, arrival.model))
    return iter(arrivals)
