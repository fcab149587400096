"""PURE. Decides which lazy models of one pool replica are loaded, and which make room. No clock, no I/O.

Events come in with the time, actions go out; `manager` carries them out and reports back with events.

What always holds (each is a test in `tests/sim/test_residency.py`):
- one load per model at a time; whoever wants it meanwhile joins;
- a model that is in use, loading, waited for, or just granted to a waiter is never unloaded;
- something is unloaded only to make room for a model that will then fit, or after its idle time;
- a model that can never fit is refused at once; one whose load failed is refused until its back-off is over;
- a failed load changes nothing for the models that were running;
- models get room in the order in which they were first waited for; one that waited for `ageing_s` gets it
  from a busy model, which takes no new requests then and is unloaded when its last one is done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from enum import StrEnum

from serve_app.residency.demand import PoolDemand

# After a grant the waiter's request is still on its way; the model is not idle until it had time to arrive.
LEASE_S = 5.0
# A Router asks again every few seconds for those who still wait; in between they keep their place in the queue.
PLACE_KEPT_S = 2.0
MAX_BACKOFF_FACTOR = 32


class Stage(StrEnum):
    """Where a lazy model is in its life on one replica."""

    STOPPED = "stopped"
    LOADING = "loading"
    AWAKE = "awake"
    UNLOADING = "unloading"


@dataclasses.dataclass(frozen=True, slots=True)
class LazyModel:
    """What the policy knows of a model from the configuration."""

    id: str
    memory_bytes: int
    priority: int
    idle_unload_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The replica's limits. Times in seconds."""

    memory_bytes: int
    min_residency_s: float
    ageing_s: float
    backoff_s: float


# Events


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """A request for the model waits here."""

    model: str


@dataclasses.dataclass(frozen=True, slots=True)
class Unwanted:
    """One waiting request has left."""

    model: str


@dataclasses.dataclass(frozen=True, slots=True)
class Activity:
    """The engine has taken or finished requests since its last report.

    So many are in flight now, and so many have arrived since its start.
    """

    model: str
    in_flight: int
    arrived: int


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """The model answers."""

    model: str


@dataclasses.dataclass(frozen=True, slots=True)
class LoadFailed:
    """The load ended without a running model; nothing of it is left."""

    model: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Unloaded:
    """The model's memory is free."""

    model: str


@dataclasses.dataclass(frozen=True, slots=True)
class StillBusy:
    """The unload found a request in flight and changed nothing."""

    model: str


@dataclasses.dataclass(frozen=True, slots=True)
class Died:
    """A running engine ended by itself; its memory is free."""

    model: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Wanted | Unwanted | Activity | Loaded | LoadFailed | Unloaded | StillBusy | Died | Tick

# Actions


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Start the model; its memory is accounted for from now on."""

    model: str


@dataclasses.dataclass(frozen=True, slots=True)
class Unload:
    """End the model. `drain`: it is in use; refuse new requests and wait for those in flight first."""

    model: str
    drain: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Grant:
    """The model is awake: let everybody who waits for it go ahead."""

    model: str


@dataclasses.dataclass(frozen=True, slots=True)
class Refuse:
    """Send everybody who waits for the model away."""

    model: str
    code: str
    reason: str
    retry_after_s: float


Action = Load | Unload | Grant | Refuse


@dataclasses.dataclass(slots=True)
class _Slot:
    model: LazyModel
    stage: Stage = Stage.STOPPED
    since: float = 0.0
    waiting: int = 0
    wanted_since: float | None = None
    left_at: float = 0.0
    in_flight: int = 0
    last_used: float = 0.0
    lease_until: float = 0.0
    arrived: int = 0
    arrived_at_grant: int = 0
    failures: int = 0
    retry_at: float = 0.0
    failure: str = ""

    def enter(self, stage: Stage, now: float) -> None:
        self.stage, self.since = stage, now
        if stage is not Stage.AWAKE:
            self.in_flight = self.arrived = self.arrived_at_grant = 0

    def idle(self, now: float) -> bool:
        return self.stage is Stage.AWAKE and not self.in_flight and not self.waiting and now >= self.lease_until


class Residency:
    """The state of one replica's lazy models. `handle` is the only way to change it."""

    def __init__(self, models: Iterable[LazyModel], limits: Limits) -> None:
        self.limits = limits
        self._slots = {model.id: _Slot(model) for model in models}

    def stage(self, model: str) -> Stage:
        """Where the model is in its life."""
        return self._slots[model].stage

    def failure(self, model: str) -> str:
        """Why the last load failed; empty after a good one."""
        return self._slots[model].failure

    def used_bytes(self) -> int:
        """Memory of all models that are not stopped."""
        return sum(slot.model.memory_bytes for slot in self._slots.values() if slot.stage is not Stage.STOPPED)

    def demand(self, held: Mapping[str, int]) -> PoolDemand:
        """What the autoscaling policy is told. `held`: by model, the calls that wait."""
        room = self.limits.memory_bytes - self._bytes(
            slot for slot in self._slots.values() if slot.stage in (Stage.LOADING, Stage.AWAKE)
        )
        coming = {model for model, slot in self._slots.items() if slot.stage is Stage.LOADING}
        unmet = {}
        waiting = [self._slots[model] for model in held if self._slots[model].stage in (Stage.STOPPED, Stage.UNLOADING)]
        for slot in sorted(waiting, key=lambda slot: (slot.wanted_since or 0.0, slot.model.id)):
            if slot.model.memory_bytes <= room:
                room -= slot.model.memory_bytes
                coming.add(slot.model.id)
            else:
                unmet[slot.model.id] = slot.model.memory_bytes
        return PoolDemand(
            held=sum(held.values()),
            awake=frozenset(model for model, slot in self._slots.items() if slot.stage is Stage.AWAKE),
            coming=frozenset(coming),
            unmet=unmet,
            free_bytes=self.limits.memory_bytes - self.used_bytes(),
        )

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in one event at time `now` (seconds, never going back) and say what to do."""
        match event:
            case Tick():
                return [*self._unload_idle(now), *self._make_room(now)]
            case Wanted(model):
                return self._wanted(self._slots[model], now)
            case Unwanted(model):
                slot = self._slots[model]
                slot.waiting = max(0, slot.waiting - 1)
                if not slot.waiting:
                    slot.left_at = now
                return self._make_room(now)
            case Activity(model, in_flight, arrived):
                slot = self._slots[model]
                if slot.stage is Stage.AWAKE:
                    slot.in_flight, slot.last_used, slot.arrived = in_flight, now, arrived
                    if arrived > slot.arrived_at_grant:
                        # What was granted has come; from here on the count tells.
                        slot.lease_until = now
                return self._make_room(now)
            case Loaded(model):
                return self._loaded(self._slots[model], now)
            case LoadFailed(model, reason):
                return self._failed(self._slots[model], reason, now)
            case Unloaded(model):
                self._slots[model].enter(Stage.STOPPED, now)
                return self._make_room(now)
            case Died(model):
                # One that is being unloaded is reported by that when its memory is free.
                if self._slots[model].stage is Stage.AWAKE:
                    self._slots[model].enter(Stage.STOPPED, now)
                return self._make_room(now)
            case StillBusy(model):
                slot = self._slots[model]
                slot.enter(Stage.AWAKE, now)
                slot.in_flight, slot.last_used, slot.lease_until = 1, now, now + LEASE_S
                return [*self._grant(slot, now), *self._make_room(now)]

    def _wanted(self, slot: _Slot, now: float) -> list[Action]:
        model = slot.model
        if model.memory_bytes > self.limits.memory_bytes:
            return [Refuse(model.id, "never_fits", "it needs more memory than this pool has", 3600)]
        if slot.stage is Stage.STOPPED and now < slot.retry_at:
            return [Refuse(model.id, "load_failed", slot.failure, slot.retry_at - now)]
        slot.waiting += 1
        if slot.stage is Stage.AWAKE:
            return self._grant(slot, now)
        if slot.wanted_since is None or (slot.waiting == 1 and now - slot.left_at > PLACE_KEPT_S):
            slot.wanted_since = now
        return self._make_room(now)

    def _grant(self, slot: _Slot, now: float) -> list[Action]:
        if not slot.waiting:
            return []
        slot.waiting, slot.wanted_since = 0, None
        slot.lease_until, slot.last_used = now + LEASE_S, now
        slot.arrived_at_grant = slot.arrived
        return [Grant(slot.model.id)]

    def _loaded(self, slot: _Slot, now: float) -> list[Action]:
        slot.enter(Stage.AWAKE, now)
        slot.last_used = now
        slot.failures, slot.failure, slot.retry_at = 0, "", 0.0
        return [*self._grant(slot, now), *self._make_room(now)]

    def _failed(self, slot: _Slot, reason: str, now: float) -> list[Action]:
        slot.enter(Stage.STOPPED, now)
        wait_s = self.limits.backoff_s * min(2**slot.failures, MAX_BACKOFF_FACTOR)
        slot.failures += 1
        slot.failure, slot.retry_at = reason, now + wait_s
        waited, slot.waiting, slot.wanted_since = slot.waiting, 0, None
        refusal: list[Action] = [Refuse(slot.model.id, "load_failed", reason, wait_s)] if waited else []
        return [*refusal, *self._make_room(now)]

    def _unload_idle(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for slot in self._slots.values():
            if slot.idle(now) and now - slot.last_used >= slot.model.idle_unload_s:
                slot.enter(Stage.UNLOADING, now)
                actions.append(Unload(slot.model.id))
        return actions

    def _make_room(self, now: float) -> list[Action]:
        """Start what waits, first come first served; stop at the first that has to wait for room."""
        actions: list[Action] = []
        waiting = [slot for slot in self._slots.values() if slot.waiting and slot.stage is Stage.STOPPED]
        for slot in sorted(waiting, key=lambda slot: (slot.wanted_since or 0.0, slot.model.id)):
            free = self.limits.memory_bytes - self.used_bytes()
            if slot.model.memory_bytes <= free:
                slot.enter(Stage.LOADING, now)
                actions.append(Load(slot.model.id))
                continue
            actions += self._evict_for(slot, slot.model.memory_bytes - free, now)
            break
        return actions

    def _evict_for(self, newcomer: _Slot, missing: int, now: float) -> list[Action]:
        """Unload what makes `missing` bytes free, or nothing where that is not to be had yet."""
        missing -= self._bytes(slot for slot in self._slots.values() if slot.stage is Stage.UNLOADING)
        if missing <= 0:
            return []
        idle = [slot for slot in self._slots.values() if slot.idle(now) and self._stayed(slot, now)]
        victims = _fewest(idle, missing)
        # Once aged also what seems idle is drained: short requests could turn every attempt into `StillBusy`.
        aged = newcomer.wanted_since is not None and now - newcomer.wanted_since >= self.limits.ageing_s
        if not victims and aged:
            awake = [slot for slot in self._slots.values() if self._may_drain(slot, now)]
            victims = _fewest(awake, missing)
        for victim in victims:
            victim.enter(Stage.UNLOADING, now)
        return [Unload(victim.model.id, drain=aged) for victim in victims]

    def _stayed(self, slot: _Slot, now: float) -> bool:
        return now - slot.since >= self.limits.min_residency_s

    def _may_drain(self, slot: _Slot, now: float) -> bool:
        # Not the lease: a stream of grants would renew it for ever. Those the load was for had their time.
        served = now - slot.since >= LEASE_S
        return slot.stage is Stage.AWAKE and not slot.waiting and served and self._stayed(slot, now)

    def _bytes(self, slots: Iterable[_Slot]) -> int:
        return sum(slot.model.memory_bytes for slot in slots)


def _fewest(candidates: list[_Slot], missing: int) -> list[_Slot]:
    """The least important, longest unused models that together hold `missing` bytes; none if all do not."""
    chosen: list[_Slot] = []
    for slot in sorted(candidates, key=lambda slot: (slot.model.priority, slot.last_used, slot.model.id)):
        if missing <= 0:
            break
        chosen.append(slot)
        missing -= slot.model.memory_bytes
    for slot in reversed(chosen):
        if missing + slot.model.memory_bytes <= 0:
            chosen.remove(slot)
            missing += slot.model.memory_bytes
    return chosen if missing <= 0 else []
