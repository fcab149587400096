"""PURE. What the requests of the last 15 minutes were like, in steps of 5 s: made from their audit records.

A request pays for a few additions to the numbers of its step and key; percentiles and sums over keys are made when
somebody looks. What is kept is bounded, whatever the traffic.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
# A part of a request's way: its name, and when it began and ended, in seconds of one clock.
Step = tuple[str, float, float]

STEP_S = 5
STEPS = 180
# Percentiles are within this part of the exact ones.
ERROR = 0.02
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
# Records that are kept whole; a key sees its own among them.
_RECORDS = 2000
# Keys times steps that are told apart; past it the oldest steps are kept as their sums only.
_MOST_APART = 4096
# Answers that went wrong though nobody refused them.
_FAULTS = frozenset({"engine_died", "engine_error", "internal_error"})
_FAULT_STATUSES = frozenset({500, 502, 504})
_LEFT = "client_left"
# Codes are ours or vLLM's, words all of them; should one ever be something else, it is not to become a name.
CODE = re.compile(r"[a-z][a-z0-9_]{0,47}")

_GROWTH = (1 + ERROR) / (1 - ERROR)
_PER_LOG = 1 / math.log(_GROWTH)
_SMALLEST, _LARGEST = 1e-3, 1e8


class Sketch:
    """A histogram with buckets that grow by 4 %: at most some 630 of them.

    A value falls into bucket i if it is in (g^(i-1), g^i], and is remembered as 2 g^i / (g + 1), which is off by
    `ERROR` at most: DDSketch, https://arxiv.org/abs/1908.10693 §2.1. Values: 0.001 to 1e8; what lies beyond counts
    as these.
    """

    __slots__ = ("buckets",)

    def __init__(self) -> None:
        self.buckets: dict[int, int] = {}

    def add(self, value: float) -> None:
        """One value."""
        bucket = math.ceil(math.log(min(max(value, _SMALLEST), _LARGEST)) * _PER_LOG)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1

    def merge(self, other: Sketch) -> None:
        """All values of another one."""
        for bucket, count in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count

    def quantile(self, part: float) -> float:
        """The value of which `part` of all are no greater (nearest rank). There must be one."""
        rank = max(1, math.ceil(part * sum(self.buckets.values())))
        ordered = sorted(self.buckets)
        sums = itertools.accumulate(self.buckets[bucket] for bucket in ordered)
        bucket = next(bucket for bucket, seen in zip(ordered, sums, strict=True) if seen >= rank)
        return float(2 * _GROWTH**bucket / (_GROWTH + 1))

    def percentiles(self) -> dict[str, float] | None:
        """Three of them; None without a value."""
        if not self.buckets:
            return None
        return {name: round(self.quantile(part), 3) for name, part in _QUANTILES.items()}


@dataclasses.dataclass(slots=True)
class Sums:
    """What is counted of requests that ended in one step. `tokens`: generated ones. Times in ms.

    `refused`: by code. `failed`: that broke off or met a fault. `sources`: who chose the model.
    """

    requests: int = 0
    failed: int = 0
    tokens: int = 0
    thinking: int = 0
    refused: dict[str, int] = dataclasses.field(default_factory=dict)
    sources: dict[str, int] = dataclasses.field(default_factory=dict)
    ttft: Sketch = dataclasses.field(default_factory=Sketch)
    tpot: Sketch = dataclasses.field(default_factory=Sketch)

    def add(self, record: Record) -> None:
        """One request."""
        self.requests += 1
        self.tokens += record["completion_tokens"]
        if record["error"] or record["status"] >= 400:
            self._went_wrong(record)
        if record["model"] is not None:
            source = record["model_source"]
            self.sources[source] = self.sources.get(source, 0) + 1
            self.thinking += record["thinking"]
        if record["ttft_ms"] is not None:
            self.ttft.add(record["ttft_ms"])
            if (between := tpot_ms(record)) is not None:
                self.tpot.add(between)

    def _went_wrong(self, record: Record) -> None:
        status, code = record["status"], record["error"]
        if code == _LEFT or status == 499:
            return
        if status < 400 or status in _FAULT_STATUSES or code in _FAULTS:
            self.failed += 1
        else:
            code = code if code and CODE.fullmatch(code) else "other"
            self.refused[code] = self.refused.get(code, 0) + 1

    def merge(self, other: Sums) -> None:
        """All requests of another one."""
        self.requests += other.requests
        self.failed += other.failed
        self.tokens += other.tokens
        self.thinking += other.thinking
        for mine, theirs in ((self.refused, other.refused), (self.sources, other.sources)):
            for name, count in theirs.items():
                mine[name] = mine.get(name, 0) + count
        self.ttft.merge(other.ttft)
        self.tpot.merge(other.tpot)

    def as_point(self, t: int) -> dict[str, Any]:
        """As the feed says it. `t`: when the step began, seconds since the epoch."""
        return {
            "t": t,
            "requests": self.requests,
            "refused": dict(self.refused),
            "failed": self.failed,
            "ttft_ms": self.ttft.percentiles(),
            "tpot_ms": self.tpot.percentiles(),
            "tokens": self.tokens,
            "sources": dict(self.sources),
            "thinking": self.thinking,
        }


def tpot_ms(record: Record) -> float | None:
    """Mean time between two tokens of a stream that went well, by its audit record."""
    if record["error"] or not record["stream"] or record["ttft_ms"] is None or record["completion_tokens"] < 2:
        return None
    between: float = (record["total_ms"] - record["ttft_ms"]) / (record["completion_tokens"] - 1)
    return between


class _Bin:
    """One step of time: by key, or where that is no longer kept, all together."""

    __slots__ = ("by_key", "rest", "t")

    def __init__(self, t: int) -> None:
        self.t = t
        self.by_key: dict[str, Sums] = {}
        self.rest = Sums()

    def total(self) -> Sums:
        total = Sums()
        for sums in (self.rest, *self.by_key.values()):
            total.merge(sums)
        return total

    def forget_keys(self) -> int:
        """Keep the sum only; how many keys that were."""
        count, self.rest, self.by_key = len(self.by_key), self.total(), {}
        return count


_NOTHING = Sums()


class Traffic:
    """The last 15 minutes of one Router. `began`: seconds since the epoch, as in the records."""

    def __init__(self, began: float) -> None:
        self.taken = 0
        self.last_used: dict[str, float] = {}
        self._began = _step_of(began)
        self._bins: deque[_Bin] = deque([_Bin(self._began)])
        self._apart = 0
        self._latest: deque[tuple[Record, Sequence[Step]]] = deque(maxlen=_RECORDS)

    def take(self, record: Record, steps: Sequence[Step] = ()) -> None:
        """One request is over, as its audit record says. `steps`: the parts of its way, the first from its arrival."""
        self.taken += 1
        self._latest.append((record, steps))
        at = record["at"]
        step = self._bins[-1]
        if at >= step.t + STEP_S:
            step = self._next(_step_of(at))
        key = record["key"]
        sums = step.by_key.get(key)
        if sums is None:
            sums = step.by_key[key] = Sums()
            self._apart += 1
            if self._apart > _MOST_APART:
                self._forget_keys()
        sums.add(record)
        if record["model"] is not None:
            self.last_used[record["model"]] = at

    def _next(self, t: int) -> _Bin:
        self._bins.append(_Bin(t))
        while self._bins[0].t <= t - STEPS * STEP_S:
            self._apart -= len(self._bins.popleft().by_key)
        return self._bins[-1]

    def _forget_keys(self) -> None:
        for step in itertools.islice(self._bins, len(self._bins) - 1):
            if self._apart <= _MOST_APART // 2:
                return
            if step.by_key:
                self._apart -= step.forget_keys()

    def points(self, now: float, key: str | None = None, since: int = 0) -> list[dict[str, Any]]:
        """A point for each step from `since` (the beginning of one) to now; of one key, or of all requests.

        Steps in which nothing ended are there, too.
        """
        last = max(_step_of(now), self._bins[-1].t)
        # A clock that was set back is behind what was told.
        first = min(max(since, self._began, last - (STEPS - 1) * STEP_S), last)
        known = {step.t: step for step in self._bins if step.t >= first}
        points = []
        for t in range(first, last + 1, STEP_S):
            step = known.get(t)
            sums = _NOTHING if step is None else step.total() if key is None else step.by_key.get(key, _NOTHING)
            points.append(sums.as_point(t))
        return points

    def latest(self, most: int, key: str | None = None, after: int = 0, until: int | None = None) -> list[Record]:
        """The newest of the requests that were taken after the first `after` and among the first `until`, in order.

        Each has its `steps`, in ms from its arrival.
        """
        until = self.taken if until is None else until
        newest = itertools.islice(reversed(self._latest), self.taken - until, max(0, self.taken - after))
        mine = (found for found in newest if key is None or found[0]["key"] == key)
        return [_with_steps(*found) for found in itertools.islice(mine, most)][::-1]


def _step_of(at: float) -> int:
    return int(at // STEP_S) * STEP_S


def _with_steps(record: Record, steps: Sequence[Step]) -> Record:
    arrived = steps[0][1] if steps else 0.0
    parts = [(name, (began - arrived) * 1000, (ended - arrived) * 1000) for name, began, ended in steps]
    if record["engine_ms"] is not None:
        parts.append(("relay", record["total_ms"] - record["engine_ms"], record["total_ms"]))
    said = [{"name": name, "from_ms": round(began, 1), "to_ms": round(ended, 1)} for name, began, ended in parts]
    return {**record, "steps": said}
