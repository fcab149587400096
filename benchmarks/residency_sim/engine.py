"""A pool of replicas under a trace: discrete events, each told to the replica's policy exactly and at once.

What the world does with an action takes the model's own time: a load, a wake, a sleep, an unload. Memory is counted
apart from the policy, and a policy that promises more than there is ends the run.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import zlib
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Protocol

from benchmarks.residency_sim.traces import Arrival
from serve_app.residency.events import (
    Abandon,
    Action,
    Activity,
    Event,
    Grant,
    LazyModel,
    Limits,
    Load,
    Loaded,
    Refuse,
    Sleep,
    Slept,
    Stage,
    StillBusy,
    Tick,
    Unload,
    Unloaded,
    Unwanted,
    Wake,
    Wanted,
    Woken,
)

PATIENCE_S = 120.0
UNLOAD_S = 2.0
_TICK_S = 1.0
_IDLE_TICK_S = 30.0


class Policy(Protocol):
    """One replica's policy: `serve_app.residency.policy.Residency`, or one it is compared with."""

    def add(self, model: LazyModel) -> None: ...
    def handle(self, event: Event, now: float) -> list[Action]: ...
    def places(self, now: float) -> list[str]: ...


@dataclasses.dataclass(slots=True)
class Report:
    """What happened. Holds in seconds; a refused request counts in them with the time that it was held.

    `starved`: those of the refused whose patience ended before their model had been given room at all.
    `most_bring_ups`: loads and wakes of the replica that had the most of them.
    """

    arrivals: int = 0
    served: int = 0
    refused: int = 0
    starved: int = 0
    cold_starts: int = 0
    wakes: int = 0
    moved_bytes: int = 0
    most_bring_ups: int = 0
    seconds: float = 0.0
    held_s: list[float] = dataclasses.field(default_factory=list)
    cold_by_hour: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)

    def hold_s(self, quantile: float) -> float:
        """Over all requests; most of them are not held."""
        direct = self.arrivals - len(self.held_s)
        index = int(quantile * (self.arrivals - 1)) - direct
        return sorted(self.held_s)[index] if index >= 0 else 0.0

    def held(self, quantile: float) -> float:
        """Over those that were held."""
        return sorted(self.held_s)[int(quantile * (len(self.held_s) - 1))] if self.held_s else 0.0


class _What(IntEnum):
    FINISH = 0
    RISEN = 1
    GONE = 2
    PATIENCE = 3
    TICK = 4


@dataclasses.dataclass(slots=True)
class _Running:
    """A model that is not stopped, as it really is."""

    model: LazyModel
    stage: Stage
    in_flight: int = 0
    arrived: int = 0
    slept: bool = False
    until: float = 0.0
    then: Stage | None = None

    def enter(self, stage: Stage) -> None:
        self.slept = stage is Stage.ASLEEP or (self.slept and stage is Stage.UNLOADING)
        self.stage = stage

    def memory(self) -> int:
        return self.model.asleep_bytes if self.slept else self.model.memory_bytes

    def host(self) -> int:
        asleep = self.slept or self.stage in (Stage.FALLING_ASLEEP, Stage.WAKING)
        return self.model.process_bytes + (self.model.host_bytes if asleep else 0)


@dataclasses.dataclass(slots=True)
class _Replica:
    policy: Policy
    running: dict[str, _Running] = dataclasses.field(default_factory=dict)
    held: dict[str, list[Arrival]] = dataclasses.field(default_factory=dict)
    used: int = 0
    used_host: int = 0
    busy: int = 0
    kept: int = 0
    ticking: bool = False
    bring_ups: int = 0


class Simulation:
    """One run. `new_policy` makes the policy of a replica; `idle_timers`: it needs ticks for them.

    `one_at_a_time`: a replica has room for a model only where it has no other.
    """

    def __init__(
        self,
        models: Sequence[LazyModel],
        replicas: int,
        limits: Limits,
        new_policy: Callable[[Limits], Policy],
        *,
        idle_timers: bool = False,
        one_at_a_time: bool = False,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.models = models
        self._by_id = {model.id: model for model in models}
        self.limits = limits
        self.idle_timers = idle_timers
        self.one_at_a_time = one_at_a_time
        self.patience_s = patience_s
        self.report = Report()
        self._replicas = [_Replica(new_policy(limits)) for _ in range(replicas)]
        self._where: dict[str, dict[int, None]] = collections.defaultdict(dict)
        self._home = {model.id: zlib.crc32(model.id.encode()) % replicas for model in models}
        self._heap: list[tuple[float, int, _What, int, str]] = []
        self._count = 0
        self._now = 0.0

    def run(self, arrivals: Iterable[Arrival]) -> Report:
        """Drive the trace through, until everybody has been served or refused."""
        heap = self._heap
        for arrival in arrivals:
            while heap and heap[0][0] <= arrival.at_s:
                self._happen(*heapq.heappop(heap))
            self._now = arrival.at_s
            self._arrive(arrival)
        self.report.seconds = self._now
        while self.report.served + self.report.refused < self.report.arrivals:
            self._happen(*heapq.heappop(heap))
        self.report.most_bring_ups = max(replica.bring_ups for replica in self._replicas)
        return self.report

    # What happens

    def _at(self, seconds: float, what: _What, number: int, model: str) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self._now + seconds, self._count, what, number, model))

    def _happen(self, at: float, _: int, what: _What, number: int, model: str) -> None:
        self._now = at
        replica = self._replicas[number]
        if what is _What.TICK:
            replica.ticking = False
            self._tell(number, Tick())
            return
        if what is _What.PATIENCE:
            self._lose_patience(number, model)
            return
        running = replica.running.get(model)
        if running is None or (what is _What.RISEN and running.until != at):
            return  # of a load that was given up
        if what is _What.FINISH:
            running.in_flight -= 1
            self.report.served += 1
            if not running.in_flight:
                replica.busy -= running.model.memory_bytes
            if running.stage is Stage.AWAKE:
                self._tell(number, Activity(model, running.in_flight, running.arrived))
            elif not running.in_flight:
                self._go(number, running)
        elif what is _What.RISEN:
            replica.busy -= running.model.memory_bytes
            woken = running.stage is Stage.WAKING
            self._enter(replica, running, Stage.AWAKE)
            self._tell(number, Woken(model, running.model.wake_s) if woken else Loaded(model, running.model.load_s))
        elif running.then is Stage.ASLEEP:
            self._enter(replica, running, Stage.ASLEEP)
            self._tell(number, Slept(model))
        else:
            self._enter(replica, running, Stage.STOPPED)
            del replica.running[model]
            self._forget(number, replica, model)
            self._tell(number, Unloaded(model))

    def _arrive(self, arrival: Arrival) -> None:
        self.report.arrivals += 1
        model = self.models[arrival.model]
        number = self._choose(model)
        replica = self._replicas[number]
        running = replica.running.get(model.id)
        if running and running.stage is Stage.AWAKE:
            self._begin(number, running, arrival)
            self._tell(number, Activity(model.id, running.in_flight, running.arrived))
            return
        replica.policy.add(model)
        replica.held.setdefault(model.id, []).append(arrival)
        self._where[model.id][number] = None
        self._at(self.patience_s, _What.PATIENCE, number, model.id)
        self._tell(number, Wanted(model.id))

    def _begin(self, number: int, running: _Running, arrival: Arrival) -> None:
        if not running.in_flight:
            self._replicas[number].busy += running.model.memory_bytes
        running.in_flight += 1
        running.arrived += 1
        self._at(arrival.service_s, _What.FINISH, number, running.model.id)

    def _lose_patience(self, number: int, model: str) -> None:
        replica = self._replicas[number]
        held = replica.held.get(model)
        # Whoever came before has been served or has left; the head is the one who loses patience now, if anybody.
        if not held or held[0].at_s + self.patience_s > self._now + 1e-6:
            return
        self._turn_away(replica, model, 1)
        self._forget(number, replica, model)
        running = replica.running.get(model)
        self.report.starved += running is None or running.stage not in (Stage.LOADING, Stage.WAKING)
        self._tell(number, Unwanted(model))

    def _turn_away(self, replica: _Replica, model: str, count: int) -> None:
        held = replica.held.pop(model)
        if left := held[count:]:
            replica.held[model] = left
        self.report.refused += count
        self.report.held_s += [self._now - arrival.at_s for arrival in held[:count]]

    def _forget(self, number: int, replica: _Replica, model: str) -> None:
        if model not in replica.running and model not in replica.held:
            self._where[model].pop(number, None)

    # Which replica: awake > coming up or waited for > asleep > room > room once idle ones sleep (where the fewest
    # sleepers must end for it) > the shortest queue. Ties go by the model's own place, so that it comes back to where
    # it is remembered. `models/replicas.py` ranks likewise, from what replicas publish.

    def _choose(self, model: LazyModel) -> int:
        best: tuple[int, int, int] | None = None
        for number in self._where[model.id]:
            replica = self._replicas[number]
            running = replica.running.get(model.id)
            if running is None:
                rank, load = 1, len(replica.held[model.id])
            else:
                rank, load = _RANKS[running.stage], running.in_flight
                if model.id in replica.held:
                    rank = min(rank, 1)
            if rank < 3 and (best is None or (rank, load, number) < best):
                best = (rank, load, number)
        if best:
            return best[2]
        count, home = len(self._replicas), self._home[model.id]
        room = 0 if self.one_at_a_time else self.limits.memory_bytes - model.memory_bytes
        best_key, best_number = (1 << 60, 0), home
        for number in itertools.chain(range(home, count), range(home)):
            replica = self._replicas[number]
            waiting = len(replica.held)
            if not waiting and replica.used <= room:
                return number
            if waiting or replica.busy > room:
                key = (1 + waiting, 0)
            else:
                # Sleeping models that would have to end for it, in bytes.
                key = (0, max(0, replica.busy + replica.kept - room))
            if key < best_key:
                best_key, best_number = key, number
        return best_number

    # What the policy wants done

    def _tell(self, number: int, event: Event) -> None:
        replica = self._replicas[number]
        todo = [event]
        for event in todo:
            for action in replica.policy.handle(event, self._now):
                todo += self._carry_out(number, replica, action)
        if not replica.ticking:
            if replica.held and replica.policy.places(self._now):
                replica.ticking = True
                self._at(_TICK_S, _What.TICK, number, "")
            elif self.idle_timers and replica.running:
                replica.ticking = True
                self._at(_IDLE_TICK_S, _What.TICK, number, "")

    def _carry_out(self, number: int, replica: _Replica, action: Action) -> Iterable[Event]:
        model = action.model
        match action:
            case Grant():
                running = replica.running[model]
                for arrival in replica.held.pop(model):
                    self.report.held_s.append(self._now - arrival.at_s)
                    self._begin(number, running, arrival)
                return (Activity(model, running.in_flight, running.arrived),)
            case Load():
                running = replica.running[model] = _Running(self._by_id[model], Stage.STOPPED)
                self._where[model][number] = None
                self._rise(number, replica, running, Stage.LOADING, running.model.load_s)
                self.report.cold_starts += 1
                self.report.cold_by_hour[int(self._now // 3600)] += 1
            case Wake():
                running = replica.running[model]
                self._rise(number, replica, running, Stage.WAKING, running.model.wake_s)
                self.report.wakes += 1
            case Sleep(_, drain) | Unload(_, drain):
                running = replica.running[model]
                if running.in_flight and not drain:
                    return (StillBusy(model), Activity(model, running.in_flight, running.arrived))
                sleep = isinstance(action, Sleep)
                running.then = Stage.ASLEEP if sleep else Stage.STOPPED
                self._enter(replica, running, Stage.FALLING_ASLEEP if sleep else Stage.UNLOADING)
                if not running.in_flight:
                    self._go(number, running)
            case Refuse():
                self._turn_away(replica, model, len(replica.held[model]))
                self._forget(number, replica, model)
            case Abandon():
                running = replica.running[model]
                replica.busy -= running.model.memory_bytes
                running.then = Stage.STOPPED
                self._enter(replica, running, Stage.UNLOADING)
                self._go(number, running)
        return ()

    def _rise(self, number: int, replica: _Replica, running: _Running, stage: Stage, seconds: float) -> None:
        self._enter(replica, running, stage)
        running.arrived, running.until = 0, self._now + seconds
        replica.busy += running.model.memory_bytes
        replica.bring_ups += 1
        self.report.moved_bytes += running.model.host_bytes
        self._at(seconds, _What.RISEN, number, running.model.id)

    def _go(self, number: int, running: _Running) -> None:
        if running.then is Stage.ASLEEP:
            self.report.moved_bytes += running.model.host_bytes
        # Level-1 sleep copies as much as a wake does.
        seconds = running.model.wake_s if running.then is Stage.ASLEEP else UNLOAD_S
        self._at(seconds, _What.GONE, number, running.model.id)

    def _enter(self, replica: _Replica, running: _Running, stage: Stage) -> None:
        if running.stage is not Stage.STOPPED:
            replica.used -= running.memory()
            replica.used_host -= running.host()
            replica.kept -= running.model.asleep_bytes if self.limits.host_bytes else 0
        running.enter(stage)
        if stage is not Stage.STOPPED:
            replica.used += running.memory()
            replica.used_host += running.host()
            replica.kept += running.model.asleep_bytes if self.limits.host_bytes else 0
        if replica.used > self.limits.memory_bytes or replica.used_host > (self.limits.host_bytes or replica.used_host):
            raise AssertionError(f"{running.model.id} {stage}: more memory promised than there is")


_RANKS = {
    Stage.AWAKE: 0,
    Stage.LOADING: 1,
    Stage.WAKING: 1,
    Stage.ASLEEP: 2,
    Stage.FALLING_ASLEEP: 2,
    Stage.UNLOADING: 3,
    Stage.STOPPED: 3,
}
