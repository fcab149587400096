"""PURE. What the residency policy is compared with, behind its interface; `POLICIES` is the table of all.

The others do what their projects do, in their favour where the simulation is simpler than the world: they too hear of
everything at once, fit models by exact memory, and never end a model in use. LRU is the residency policy itself with
another order of who goes, so that nothing else tells the two apart.
"""

from __future__ import annotations

import abc
import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

from benchmarks.residency_sim.engine import Policy
from serve_app.residency.events import (
    Action,
    Activity,
    Event,
    Grant,
    LazyModel,
    Limits,
    Load,
    Loaded,
    Stage,
    StillBusy,
    Unload,
    Unloaded,
    Unwanted,
    Wanted,
)
from serve_app.residency.policy import Residency

OLLAMA_KEEP_ALIVE_S = 300.0


class Lru(Residency):
    """The least recently used goes, awake or asleep; no minimum residency, and nobody is drained for one who waits."""

    def __init__(self, limits: Limits) -> None:
        super().__init__((), dataclasses.replace(limits, min_residency_s=0.0, ageing_s=float("inf")))

    def _value(self, now: float, **_: bool) -> Callable[[Any], tuple[int, float, float, str]]:
        return lambda slot: (slot.model.priority, slot.last_used, 0.0, slot.model.id)


@dataclasses.dataclass(slots=True)
class _Entry:
    model: LazyModel
    stage: Stage = Stage.STOPPED
    waiting: int = 0
    in_flight: int = 0
    last_used: float = 0.0


class _Fifo(abc.ABC):
    """What llama-swap and Ollama share: nothing sleeps, and models get room in the order in which they were asked for.

    `_advance` is told of every change and says what is loaded and unloaded.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._known: dict[str, _Entry] = {}
        self._up: dict[str, _Entry] = {}
        self._queue: dict[str, _Entry] = {}

    def add(self, model: LazyModel) -> None:
        self._known.setdefault(model.id, _Entry(model))

    def places(self, now: float) -> list[str]:
        return list(self._queue)

    def handle(self, event: Event, now: float) -> list[Action]:
        granted: list[Action] = []
        match event:
            case Wanted(model):
                entry = self._known[model]
                entry.waiting += 1
                if entry.stage is Stage.AWAKE:
                    granted = self._grant(entry, now)
                elif entry.stage is not Stage.LOADING:
                    self._queue[model] = entry
            case Unwanted(model):
                entry = self._known[model]
                entry.waiting -= 1
                if not entry.waiting:
                    self._queue.pop(model, None)
            case Activity(model, in_flight):
                entry = self._known[model]
                entry.in_flight, entry.last_used = in_flight, now
            case Loaded(model) | StillBusy(model):
                entry = self._known[model]
                entry.stage = Stage.AWAKE
                granted = self._grant(entry, now)
            case Unloaded(model):
                self._known[model].stage = Stage.STOPPED
                del self._up[model]
        return [*granted, *self._advance(now)]

    def _grant(self, entry: _Entry, now: float) -> list[Action]:
        entry.last_used = now
        if not entry.waiting:
            return []
        entry.in_flight, entry.waiting = entry.waiting, 0
        self._queue.pop(entry.model.id, None)
        return [Grant(entry.model.id)]

    @abc.abstractmethod
    def _advance(self, now: float) -> list[Action]:
        """What is to be loaded and unloaded now."""

    def _load(self, entry: _Entry) -> Action:
        del self._queue[entry.model.id]
        entry.stage, entry.in_flight = Stage.LOADING, 0
        self._up[entry.model.id] = entry
        return Load(entry.model.id)

    def _unload(self, entry: _Entry, drain: bool = False) -> Action:
        entry.stage = Stage.UNLOADING
        return Unload(entry.model.id, drain)


class FifoSwap(_Fifo):
    """llama-swap with its default group: one model at a time, and another one only when nothing is in flight.

    A request for the model that runs goes ahead of those that wait (`internal/router/scheduler/fifo.go`).
    """

    def _advance(self, now: float) -> list[Action]:
        for entry in self._queue.values():
            if not self._up:
                return [self._load(entry)]
            return [
                self._unload(other) for other in self._up.values() if other.stage is Stage.AWAKE and not other.in_flight
            ]
        return []


class IdleFirst(_Fifo):
    """Ollama: the first who waits is seen to before all others; an idle model goes for it, or the first to become so.

    With equal keep-alives, and they are all five minutes here, which of the idle ones is chance (`server/sched.go`).
    Its limit of three models for each GPU is left out.
    """

    def _advance(self, now: float) -> list[Action]:
        actions: list[Action] = [
            self._unload(entry)
            for entry in self._up.values()
            if entry.stage is Stage.AWAKE and not entry.in_flight and now - entry.last_used >= OLLAMA_KEEP_ALIVE_S
        ]
        while self._queue:
            entry = next(iter(self._queue.values()))
            if entry.stage is Stage.UNLOADING or any(other.stage is Stage.UNLOADING for other in self._up.values()):
                break
            used = sum(other.model.memory_bytes for other in self._up.values())
            if used + entry.model.memory_bytes <= self._limits.memory_bytes:
                actions.append(self._load(entry))
                continue
            awake = [other for other in self._up.values() if other.stage is Stage.AWAKE]
            if awake:
                chosen = min(awake, key=lambda other: (other.in_flight > 0, zlib.crc32(other.model.id.encode())))
                actions.append(self._unload(chosen, drain=True))
            break
        return actions


@dataclasses.dataclass(frozen=True, slots=True)
class Contender:
    """One line of the table."""

    new: Callable[[Limits], Policy]
    sleeps: bool
    idle_timers: bool = False
    one_at_a_time: bool = False


POLICIES: dict[str, Contender] = {
    "ours": Contender(lambda limits: Residency((), limits), sleeps=True),
    "LRU with sleep": Contender(Lru, sleeps=True),
    "ours, no sleep": Contender(lambda limits: Residency((), limits), sleeps=False),
    "LRU": Contender(Lru, sleeps=False),
    "FIFO swap (llama-swap)": Contender(FifoSwap, sleeps=False, one_at_a_time=True),
    "idle-first (Ollama)": Contender(IdleFirst, sleeps=False, idle_timers=True),
}
