"""PURE. Decides which lazy models of one pool replica are awake, asleep or stopped. No clock, no I/O.

Events come in with the time, actions go out; `manager` carries them out and reports back with events.

What always holds (each is a test in `tests/sim/`):
- one load or wake per model at a time; whoever wants it meanwhile joins;
- a model that is in use, on its way up, waited for, or just granted to a waiter is never put to sleep or unloaded
  (a sleeping one that waits behind an aged one may be ended; who waits for it stays, and it is loaded anew);
- something goes only to make room for a model that will then fit, after its idle time, or on an operator's word;
- a model that can never fit is refused at once; one whose load failed is refused until its back-off is over;
- a failed load changes nothing for the models that were running;
- where engines measure the accelerator as they load, a load that failed while others moved is tried once more;
- models get room in the order of priority and waiting time; one that waited for `ageing_s` gets it from a busy
  model, which takes no new requests then and goes when its last one is done;
- a load that nobody wants any more is given up only where another model waits for its room.

Which models go for it is the matter of `victims`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from serve_app.residency.demand import PoolDemand
from serve_app.residency.events import (
    Abandon,
    Action,
    Activity,
    Died,
    Event,
    Grant,
    LazyModel,
    Limits,
    Load,
    Loaded,
    LoadFailed,
    Order,
    Ordered,
    Refuse,
    Replaced,
    Sleep,
    SleepFailed,
    Slept,
    Stage,
    StillBusy,
    Tick,
    Unload,
    Unloaded,
    Unwanted,
    Wake,
    WakeFailed,
    Wanted,
    Woken,
)
from serve_app.residency.slot import GOING, RISING, Slot
from serve_app.residency.victims import LEASE_S, Victims, fewest

MAX_BACKOFF_FACTOR = 32
# A model that dies this soon after its load, and not for the first time, is as good as one that fails to load.
EARLY_DEATH_S = 30.0


class Residency:
    """The state of one replica's lazy models. `handle` is the only way to change it."""

    def __init__(self, models: Iterable[LazyModel], limits: Limits) -> None:
        self.limits = limits
        self._victims = Victims(limits)
        self._slots: dict[str, Slot] = {}
        for model in models:
            self.add(model)
        # The few that are not stopped; a pool may know thousands.
        self._up: dict[str, Slot] = {}
        self._queue: dict[str, Slot] = {}
        self._pins: dict[str, Slot] = {}
        self._outgrown = False

    def add(self, model: LazyModel) -> None:
        """Make a model known, stopped; nothing where it is known."""
        if model.id not in self._slots:
            self._slots[model.id] = Slot(model, model.memory_bytes, model.load_s, model.wake_s)

    def configure(self, model: LazyModel) -> None:
        """Make a model known, or give a known one new settings; its memory counts anew once it is stopped."""
        self.add(model)
        slot = self._slots[model.id]
        if slot.stage is Stage.STOPPED:
            slot.bytes = model.memory_bytes
        elif model.memory_bytes > slot.bytes:
            slot.bytes, self._outgrown = model.memory_bytes, True
        slot.model = model

    def forget(self, model: str) -> bool:
        """Forget a model; False while it is up or wanted."""
        slot = self._slots[model]
        if slot.stage is not Stage.STOPPED or slot.claimed or model in self._queue:
            return False
        del self._slots[model]
        self._up.pop(model, None)
        self._pins.pop(model, None)
        return True

    def stage(self, model: str) -> Stage:
        """Where the model is in its life."""
        return self._slots[model].stage

    def failure(self, model: str) -> str:
        """Why the last load failed; empty after a good one."""
        return self._slots[model].failure

    def pinned(self, model: str) -> bool:
        """Whether an operator keeps it."""
        return self._slots[model].pinned

    def lost_pins(self, now: float) -> list[str]:
        """Pinned models that have died or failed, and can be had again."""
        return [
            model
            for model, slot in self._pins.items()
            if slot.stage is Stage.STOPPED and not slot.claimed and self._refusal(slot, now) is None
        ]

    def memory_bytes(self, model: str) -> int:
        """What the model takes while it is awake: as configured, or as measured where that was more."""
        return self._slots[model].bytes

    def expected_s(self, model: str) -> float:
        """How long it would take to bring the model up from where it is, without waiting for room."""
        slot = self._slots[model]
        match slot.stage:
            case Stage.AWAKE:
                return 0.0
            case Stage.ASLEEP | Stage.FALLING_ASLEEP | Stage.WAKING:
                return slot.wake_s
        return slot.load_s

    def load_s(self, model: str) -> float:
        """How long a load takes, by the configuration or as it was of late."""
        return self._slots[model].load_s

    def used_bytes(self) -> int:
        """Accelerator memory of all models that are not stopped."""
        return sum(slot.memory() for slot in self._up.values())

    def used_host_bytes(self) -> int:
        """Host memory of all models that are not stopped, as far as it is counted."""
        return sum(slot.host() for slot in self._up.values())

    def places(self, now: float) -> list[str]:
        """The models that wait for room, in the order in which they will get it."""
        return [slot.model.id for slot in self._in_order(now)]

    def needs(self, model: str) -> int:
        """Accelerator memory that must be found for the model to come up from where it is."""
        slot = self._slots[model]
        return 0 if slot.stage not in (Stage.STOPPED, Stage.ASLEEP) else slot.bytes - slot.memory()

    def refusal(self, model: str, now: float) -> Refuse | None:
        """Why the model cannot be had at all or for a while, where that is known at once."""
        return self._refusal(self._slots[model], now)

    def demand(self, held: Mapping[str, int]) -> PoolDemand:
        """What the autoscaling policy is told. `held`: by model, the calls that wait."""
        stays = [slot for slot in self._up.values() if slot.stage not in GOING]
        room = self.limits.memory_bytes - sum(slot.memory() for slot in stays)
        coming = {slot.model.id for slot in stays if slot.stage in RISING}
        unmet = {}
        waiting = [
            slot
            for slot in map(self._slots.__getitem__, held)
            if slot.stage in (Stage.STOPPED, Stage.ASLEEP) or slot.stage in GOING
        ]
        for slot in sorted(waiting, key=lambda slot: (slot.wanted_since or 0.0, slot.model.id)):
            if slot.bytes <= room:
                room -= slot.bytes
                coming.add(slot.model.id)
            else:
                unmet[slot.model.id] = slot.bytes
        return PoolDemand(
            held=sum(held.values()),
            # One that goes when its requests are done has them until then.
            awake=frozenset(
                slot.model.id
                for slot in self._up.values()
                if slot.stage is Stage.AWAKE or (slot.stage in GOING and slot.in_flight)
            ),
            coming=frozenset(coming),
            unmet=unmet,
            free_bytes=self.limits.memory_bytes - self.used_bytes(),
        )

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in one event at time `now` (seconds, never going back) and say what to do."""
        match event:
            case Tick():
                return [*self._end_idle(now), *self._make_room(now)]
            case Wanted(model):
                return self._wanted(self._slots[model], now)
            case Unwanted(model):
                slot = self._slots[model]
                slot.waiting = max(0, slot.waiting - 1)
                if not slot.waiting:
                    slot.left_at = now
                    self._requeue(slot)
                return self._make_room(now)
            case Activity(model, in_flight, arrived):
                return self._active(self._slots[model], in_flight, arrived, now)
            case LoadFailed(model) | Woken(model) if self._slots[model].stage not in RISING:
                return []  # it ended just when it was given up; `Unloaded` will say that it is gone
            case Loaded(model, seconds, memory_bytes):
                slot = self._slots[model]
                # It runs, so it fits, at least alone: what it was measured to take must not keep it out for ever.
                measured = min(memory_bytes, self.limits.memory_bytes)
                if measured > slot.bytes:
                    slot.bytes, self._outgrown = measured, True
                if slot.stage not in RISING:
                    return []  # likewise; until it is gone it takes that
                slot.load_s = _recent(slot.load_s, seconds, guessed=slot.load_s == slot.model.load_s)
                return self._risen(slot, now)
            case Woken(model, seconds):
                slot = self._slots[model]
                slot.wake_s = _recent(slot.wake_s, seconds, guessed=slot.wake_s == slot.model.wake_s)
                return self._risen(slot, now)
            case LoadFailed(model, reason):
                return self._failed(self._slots[model], reason, now)
            case WakeFailed(model, _):
                # Its waiters stay: it is loaded anew, and does not sleep again.
                self._slots[model].may_sleep = False
                return self._fallen(self._slots[model], Stage.STOPPED, now)
            case Slept(model):
                slot = self._slots[model]
                if slot.outdated or (slot.ends_after_sleep and not slot.claimed):
                    self._enter(slot, Stage.ASLEEP, now)  # what it holds is by now a sleeper's
                    self._enter(slot, Stage.UNLOADING, now)
                    self._disturb()
                    return [Unload(model), *self._make_room(now)]
                return self._fallen(slot, Stage.ASLEEP, now)
            case SleepFailed(model):
                slot = self._slots[model]
                slot.may_sleep = False
                self._enter(slot, Stage.UNLOADING, now)
                return [Unload(model), *self._make_room(now)]
            case Unloaded(model):
                return self._fallen(self._slots[model], Stage.STOPPED, now)
            case Died(model, reason):
                return self._died(self._slots[model], reason, now)
            case StillBusy(model, arrived):
                slot = self._slots[model]
                slot.count(max(0, arrived - max(slot.arrived, slot.arrived_at_grant)), now)
                slot.arrived = max(slot.arrived, arrived)
                slot.in_flight, slot.lease_until = 1, now + LEASE_S
                return self._risen(slot, now)
            case Ordered(model, order):
                return self._ordered(self._slots[model], order, now)
            case Replaced(model):
                return self._replaced(self._slots[model], now)

    # What happens to one model

    def _wanted(self, slot: Slot, now: float) -> list[Action]:
        if refusal := self._refusal(slot, now):
            self._dismiss(slot)
            return [refusal]
        slot.count(1, now)
        if slot.stage is not Stage.AWAKE:
            slot.line_up(now)
        slot.waiting += 1
        slot.then = None
        if slot.stage is Stage.AWAKE:
            return self._grant(slot, now)
        self._requeue(slot)
        return self._make_room(now)

    def _refusal(self, slot: Slot, now: float) -> Refuse | None:
        model = slot.model.id
        if slot.bytes > self.limits.memory_bytes or self._host_limit(slot.model.process_bytes):
            return Refuse(model, "never_fits", "it needs more memory than this pool has", 3600)
        if slot.stage not in (Stage.STOPPED, Stage.ASLEEP):
            return None
        if now < slot.retry_at:
            return Refuse(model, "load_failed", slot.failure, slot.retry_at - now)
        pinned = [other for other in self._up.values() if other.pinned and other is not slot]
        host = sum(other.host() for other in pinned) + slot.model.process_bytes
        if sum(other.bytes for other in pinned) + slot.bytes > self.limits.memory_bytes or self._host_limit(host):
            return Refuse(model, "no_room", "pinned models hold the memory that it needs", 60)
        coming, host_coming = self._coming()
        if not self.limits.evicts and (self._missing(slot) > coming or self._host_needed(slot) > host_coming):
            return Refuse(model, "no_room", "other models hold the memory, and this pool evicts none", 30)
        return None

    def _host_limit(self, needed: int) -> bool:
        return 0 < self.limits.host_bytes < needed

    def _active(self, slot: Slot, in_flight: int, arrived: int, now: float) -> list[Action]:
        if slot.stage in (Stage.AWAKE, *GOING):
            # What was granted has been counted when it was wanted.
            slot.count(max(0, arrived - max(slot.arrived, slot.arrived_at_grant)), now)
            slot.in_flight, slot.last_used, slot.arrived = in_flight, now, arrived
            if arrived > slot.arrived_at_grant:
                # What was granted has come; from here on the count tells.
                slot.lease_until = now
        return self._make_room(now)

    def _grant(self, slot: Slot, now: float) -> list[Action]:
        if not slot.waiting:
            return []
        slot.waiting, slot.wanted_since = 0, None
        self._requeue(slot)
        slot.lease_until, slot.last_used = now + LEASE_S, now
        slot.arrived_at_grant = slot.arrived
        return [Grant(slot.model.id)]

    def _risen(self, slot: Slot, now: float) -> list[Action]:
        then = slot.then
        self._enter(slot, Stage.AWAKE, now)
        slot.last_used = now
        slot.failure, slot.retry_at, slot.ordered, slot.tried_again = "", 0.0, False, False
        if not slot.waiting:
            slot.wanted_since = None
        if slot.outdated:
            return [self._stop(slot, now, drain=True), *self._make_room(now)]
        if then:
            return [*self._put_away(slot, then, now), *self._make_room(now)]
        return [*self._grant(slot, now), *self._make_room(now)]

    def _fallen(self, slot: Slot, stage: Stage, now: float) -> list[Action]:
        self._enter(slot, stage, now)
        self._disturb()
        return self._make_room(now)

    def _disturb(self) -> None:
        """Memory of the accelerator was given back, or is taken by one that wakes."""
        if self.limits.measured:
            for slot in self._up.values():
                slot.disturbed = slot.disturbed or slot.stage is Stage.LOADING

    def _failed(self, slot: Slot, reason: str, now: float) -> list[Action]:
        self._enter(slot, Stage.STOPPED, now)
        self._disturb()
        if slot.disturbed and not slot.tried_again:
            # vLLM ends its start where the free memory grew (vllm-project/vllm#56830). Who waits goes on waiting.
            slot.tried_again = True
            return self._make_room(now)
        slot.tried_again = False
        return [*self._back_off(slot, reason, now), *self._make_room(now)]

    def _back_off(self, slot: Slot, reason: str, now: float) -> list[Action]:
        wait_s = self.limits.backoff_s * min(2**slot.failures, MAX_BACKOFF_FACTOR)
        slot.failures += 1
        slot.failure, slot.retry_at = reason, now + wait_s
        waited = slot.waiting
        self._dismiss(slot)
        return [Refuse(slot.model.id, "load_failed", reason, wait_s)] if waited else []

    def _died(self, slot: Slot, reason: str, now: float) -> list[Action]:
        refusal: list[Action] = []
        # One that was on its way somewhere is reported by that, when its memory is free.
        if slot.stage in (Stage.AWAKE, Stage.ASLEEP):
            early = slot.stage is Stage.AWAKE and now - slot.since < EARLY_DEATH_S
            self._enter(slot, Stage.STOPPED, now)
            self._disturb()
            if not early:
                slot.failures = 0
            elif slot.early_deaths:
                refusal = self._back_off(slot, reason, now)
            slot.early_deaths = slot.early_deaths + 1 if early else 0
        return [*refusal, *self._make_room(now)]

    def _replaced(self, slot: Slot, now: float) -> list[Action]:
        """End the engine that is there, when its requests are done. Who waits goes on waiting, for the next one."""
        # What failed may have been mended.
        slot.failures = slot.early_deaths = 0
        slot.failure, slot.retry_at = "", 0.0
        match slot.stage:
            case Stage.LOADING:
                return [self._give_up(slot, now), *self._make_room(now)]
            case Stage.AWAKE | Stage.ASLEEP:
                return [self._stop(slot, now, drain=slot.stage is Stage.AWAKE), *self._make_room(now)]
        slot.outdated = slot.stage is not Stage.STOPPED
        return self._make_room(now)

    def _ordered(self, slot: Slot, order: Order, now: float) -> list[Action]:
        match order:
            case Order.LOAD | Order.PIN:
                if order is Order.PIN:
                    slot.pinned, self._pins[slot.model.id] = True, slot
                slot.then = None
                if slot.stage is not Stage.AWAKE and self._refusal(slot, now) is None:
                    slot.line_up(now)
                    slot.ordered = True
                    self._requeue(slot)
                slot.last_used = max(slot.last_used, now)
            case Order.UNPIN:
                slot.pinned = False
                self._pins.pop(slot.model.id, None)
            case Order.SLEEP | Order.UNLOAD:
                if slot.ordered:
                    slot.left_at = now
                slot.pinned = slot.ordered = False
                self._pins.pop(slot.model.id, None)
                self._requeue(slot)
                return [*self._put_away(slot, order, now), *self._make_room(now)]
        return self._make_room(now)

    def _put_away(self, slot: Slot, order: Order, now: float) -> list[Action]:
        model = slot.model.id
        if slot.stage is Stage.LOADING and not slot.waiting and order is Order.UNLOAD:
            self._enter(slot, Stage.UNLOADING, now)
            return [Abandon(model)]
        if slot.stage in RISING and not slot.waiting:
            slot.then = order
            return []
        slot.ends_after_sleep = slot.stage is Stage.FALLING_ASLEEP and order is Order.UNLOAD
        if slot.waiting or slot.stage not in (Stage.AWAKE, Stage.ASLEEP):
            return []
        if order is Order.SLEEP and self._victims.may_sleep(slot) and self._host_missing(slot.model.host_bytes) <= 0:
            if slot.stage is Stage.ASLEEP:
                return []
            self._enter(slot, Stage.FALLING_ASLEEP, now)
            return [Sleep(model, drain=True)]
        drain = slot.stage is Stage.AWAKE
        self._enter(slot, Stage.UNLOADING, now)
        return [Unload(model, drain=drain)]

    # Room

    def _enter(self, slot: Slot, stage: Stage, now: float) -> None:
        slot.enter(stage, now)
        if stage is Stage.STOPPED:
            self._up.pop(slot.model.id, None)
        else:
            self._up[slot.model.id] = slot
        self._requeue(slot)

    def _requeue(self, slot: Slot) -> None:
        if slot.claimed and slot.stage in (Stage.STOPPED, Stage.ASLEEP):
            self._queue[slot.model.id] = slot
        else:
            self._queue.pop(slot.model.id, None)

    def _dismiss(self, slot: Slot) -> None:
        """Whoever waits for it is refused, and an operator's order dropped."""
        slot.waiting, slot.wanted_since, slot.ordered = 0, None, False
        self._requeue(slot)

    def _in_order(self, now: float) -> list[Slot]:
        """Who waits for room; each `ageing_s` of waiting is worth one step of priority."""

        def rank(slot: Slot) -> tuple[float, float, str]:
            since = now if slot.wanted_since is None else slot.wanted_since
            gained = int((now - since) / self.limits.ageing_s) if self.limits.ageing_s else math.inf
            return -(slot.model.priority + gained), since, slot.model.id

        return sorted(self._queue.values(), key=rank)

    def _end_idle(self, now: float) -> list[Action]:
        actions: list[Action] = []
        # There is no hurry: an engine that measures what is free is let finish.
        later = self.limits.measured and any(slot.stage is Stage.LOADING for slot in self._up.values())
        for slot in list(self._up.values()):
            model = slot.model
            if slot.pinned or slot.claimed:
                continue
            unused_s = now - slot.last_used
            if slot.stage is Stage.AWAKE and now - slot.since >= EARLY_DEATH_S:
                slot.failures = slot.early_deaths = 0
            if later:
                continue
            drowsy = model.idle_sleep_s is not None and unused_s >= model.idle_sleep_s and self._victims.may_sleep(slot)
            if slot.idle(now) and drowsy and self._host_missing(model.host_bytes) <= 0:
                self._enter(slot, Stage.FALLING_ASLEEP, now)
                actions.append(Sleep(model.id))
            elif (slot.idle(now) or slot.stage is Stage.ASLEEP) and unused_s >= model.idle_unload_s:
                self._enter(slot, Stage.UNLOADING, now)
                actions.append(Unload(model.id))
        return actions

    def _make_room(self, now: float) -> list[Action]:
        """Bring up what waits, in order. Behind one that must wait for room others go first only where they fit
        into what is free, leave it the room that is on its way, and it has not aged."""
        actions: list[Action] = []
        blocked: Slot | None = None
        for slot in self._in_order(now) if self._queue else ():
            missing, host_missing = self._missing(slot), self._host_needed(slot)
            if missing <= 0 and host_missing <= 0:
                if blocked is None or self._leaves_room(slot, blocked):
                    actions.append(self._bring_up(slot, now))
            elif refusal := self._refusal(slot, now):
                self._dismiss(slot)
                actions.append(refusal)
            elif blocked is None:
                actions += self._evict_for(slot, missing, host_missing, now)
                blocked = slot
                if self._aged(slot, now):
                    break
        return actions or self._shed(now)

    def _leaves_room(self, slot: Slot, first: Slot) -> bool:
        """Whether the room that is on its way for the first in the queue, if it is, stays enough for it."""
        coming, host_coming = self._coming()
        missing, host_missing = self._missing(first) - coming, self._host_needed(first) - host_coming
        if missing > 0 or host_missing > 0:
            return True
        process = slot.model.process_bytes if self.limits.host_bytes and slot.stage is Stage.STOPPED else 0
        return missing + slot.bytes - slot.memory() <= 0 and host_missing + process <= 0

    def _bring_up(self, slot: Slot, now: float) -> Action:
        asleep = slot.stage is Stage.ASLEEP
        if asleep:
            self._disturb()
        self._enter(slot, Stage.WAKING if asleep else Stage.LOADING, now)
        return Wake(slot.model.id) if asleep else Load(slot.model.id)

    def _missing(self, slot: Slot) -> int:
        """Accelerator bytes that the model lacks to come up; negative: so many would be left."""
        return slot.bytes - slot.memory() - (self.limits.memory_bytes - self.used_bytes())

    def _host_missing(self, needed: int) -> int:
        """Host bytes that are lacking; 0 where they are not counted."""
        return self.used_host_bytes() + needed - self.limits.host_bytes if self.limits.host_bytes else 0

    def _host_needed(self, slot: Slot) -> int:
        return self._host_missing(slot.model.process_bytes) if slot.stage is Stage.STOPPED else 0

    def _coming(self) -> tuple[int, int]:
        """Accelerator and host bytes that will be free when all that goes is gone."""
        unloads = [slot for slot in self._up.values() if slot.stage is Stage.UNLOADING]
        sleeps = [slot for slot in self._up.values() if slot.stage is Stage.FALLING_ASLEEP]
        freed = sum(slot.memory() for slot in unloads) + sum(slot.bytes - slot.model.asleep_bytes for slot in sleeps)
        return freed, sum(slot.host() for slot in unloads)

    def _aged(self, slot: Slot, now: float) -> bool:
        return slot.wanted_since is not None and now - slot.wanted_since >= self.limits.ageing_s

    def _evict_for(self, newcomer: Slot, missing: int, host_missing: int, now: float) -> list[Action]:
        """Let go what makes room for the newcomer, or nothing where that is not to be had yet."""
        coming, host_coming = self._coming()
        missing, host_missing = missing - coming, host_missing - host_coming
        others = sorted(
            (s for s in self._up.values() if not s.pinned and s is not newcomer), key=self._victims.value(now)
        )
        aged = self._aged(newcomer, now)
        # Also one that waits behind an aged one, as the last: both could wait for the memory that the other holds.
        asleep = [slot for slot in others if slot.stage is Stage.ASLEEP and (aged or not slot.claimed)]
        asleep.sort(key=lambda slot: slot.claimed)
        idle = [slot for slot in others if slot.idle(now) and self._victims.stayed(slot, now)]
        # Once aged also what seems idle is drained: short requests could turn every attempt into `StillBusy`.
        busy = [slot for slot in others if self._victims.may_drain(slot, now)] if aged else []
        for awake in (idle, busy):
            if choice := self._victims.choose(asleep, awake, missing, host_missing, now):
                ended, let_go = choice
                actions = [self._stop(slot, now, aged and slot.stage is Stage.AWAKE) for slot in ended]
                for slot in let_go:
                    actions += self._let_go(slot, newcomer, asleep, aged, now)
                return actions
        return [self._give_up(slot, now) for slot in self._victims.abandonable(others, missing, host_missing, now)]

    def _let_go(self, slot: Slot, newcomer: Slot, asleep: list[Slot], drain: bool, now: float) -> list[Action]:
        """Put an awake model to sleep where the host has room for it and the newcomer, or gets it from models that
        are worth less."""
        if self._victims.may_sleep(slot):
            needed = newcomer.model.process_bytes if newcomer.stage is Stage.STOPPED else 0
            lacking = self._host_missing(slot.model.host_bytes + needed)
            if lacking <= 0:
                self._enter(slot, Stage.FALLING_ASLEEP, now)
                return [Sleep(slot.model.id, drain=drain)]
            coming = sum(s.host() for s in self._up.values() if s.stage is Stage.UNLOADING)
            if lacking <= coming:
                return []  # when that is free it sleeps
            worth = self._victims.value(now, asleep=True)
            lesser = [s for s in asleep if s.stage is Stage.ASLEEP and not s.claimed and worth(s) < worth(slot)]
            if ended := fewest(lesser, lacking - coming, Slot.host):
                return [self._stop(s, now) for s in ended]
        self._enter(slot, Stage.UNLOADING, now)
        return [Unload(slot.model.id, drain=drain)]

    def _stop(self, slot: Slot, now: float, drain: bool = False) -> Action:
        self._enter(slot, Stage.UNLOADING, now)
        return Unload(slot.model.id, drain)

    def _give_up(self, slot: Slot, now: float) -> Action:
        self._enter(slot, Stage.UNLOADING, now)
        return Abandon(slot.model.id)

    def _shed(self, now: float) -> list[Action]:
        """Where models turned out larger than configured: let go until all of them fit again."""
        if not self._outgrown:
            return []  # and nothing to add up for each request
        over = self.used_bytes() - self.limits.memory_bytes
        over -= sum(slot.memory() for slot in self._up.values() if slot.stage in GOING)
        if over <= 0:
            return []
        idle = [slot for slot in self._up.values() if slot.idle(now) and not slot.pinned]
        return [self._stop(slot, now) for slot in fewest(sorted(idle, key=self._victims.value(now)), over, Slot.memory)]


def _recent(before: float, seconds: float, *, guessed: bool) -> float:
    """The first measurement, later half the last one and half what was known; as it was where nothing was measured."""
    if seconds <= 0:
        return before
    return seconds if guessed else (before + seconds) / 2
