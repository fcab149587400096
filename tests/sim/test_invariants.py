"""What always holds of `serve_app.residency.policy`, whatever happens in whatever order.

Each test lets `world.live` do random things for a while; a `Watch` looks at every decision.
"""

import math
import random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from world import NAMES, RISING, Watch, World, live, random_world

from serve_app.residency.events import (
    Abandon,
    Action,
    Activity,
    Event,
    Grant,
    Load,
    Loaded,
    LoadFailed,
    Order,
    Ordered,
    Refuse,
    Sleep,
    SleepFailed,
    Slept,
    Stage,
    StillBusy,
    Unload,
    Unloaded,
    Unwanted,
    Wake,
    WakeFailed,
    Wanted,
    Woken,
)
from serve_app.residency.policy import MAX_BACKOFF_FACTOR
from serve_app.residency.slot import PLACE_KEPT_S
from serve_app.residency.victims import LEASE_S

always = settings(max_examples=2000, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
lives = given(seed=st.integers(0, 2**32), steps=st.integers(10, 70))

GOES = (Sleep, Unload, Abandon)


def watched(watch: type[Watch], seed: int, steps: int) -> World:
    """A random world after so many random things, all of them seen by the watch."""
    rng = random.Random(seed)
    w = random_world(rng)
    w.watch = watch(w)
    live(w, rng, steps)
    return w


class Queue(Watch):
    """Keeps its own books of who waits since when, be it a request or an operator."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.since: dict[str, float] = {}
        self.left_at: dict[str, float] = {}
        self.ordered: set[str] = set()
        # Told to go while they fall asleep or come up: they go when they have, if nobody asks for them meanwhile.
        self.told: set[str] = set()
        self.due = ""

    def claimed(self, name: str) -> bool:
        return bool(self.w.waiting[name]) or name in self.ordered

    def _lines_up(self, name: str, claimed: bool) -> None:
        kept = name in self.since and self.w.now - self.left_at.get(name, self.w.now) <= PLACE_KEPT_S
        if not kept and not claimed:
            self.since[name] = self.w.now

    def _served(self, name: str) -> None:
        self.ordered.discard(name)
        self.since.pop(name, None)

    def hears(self, event: Event) -> None:
        self._hears_orders(event)
        match event:
            case Wanted(name) if self.w.stage(name) is not Stage.AWAKE:
                self._lines_up(name, self.w.waiting[name] > 1 or name in self.ordered)
            case Ordered(name, Order.LOAD | Order.PIN):
                if self.w.stage(name) is not Stage.AWAKE and self.w.policy.refusal(name, self.w.now) is None:
                    self._lines_up(name, self.claimed(name))
                    self.ordered.add(name)
            case Ordered(name, Order.SLEEP | Order.UNLOAD) if name in self.ordered:
                self.ordered.remove(name)
                self.left_at[name] = self.w.now
            case Unwanted(name) if not self.w.waiting[name]:
                self.left_at[name] = self.w.now
            case Loaded(name) | LoadFailed(name) if self.w.stage(name) is Stage.LOADING:
                self._served(name)
            case Woken(name) | StillBusy(name):
                self._served(name)

    def _hears_orders(self, event: Event) -> None:
        self.due = ""
        match event:
            case Ordered(name, Order.SLEEP | Order.UNLOAD) if self.w.stage(name) in RISING and not self.w.waiting[name]:
                self.told.add(name)
            case Ordered(name, Order.UNLOAD) if self.w.stage(name) is Stage.FALLING_ASLEEP:
                self.told.add(name)
            case Ordered(name, Order.SLEEP | Order.LOAD | Order.PIN) | Wanted(name):
                self.told.discard(name)
            case Slept(name) | Loaded(name) | Woken(name) if name in self.told:
                self.told.remove(name)
                self.due = name
            case LoadFailed(name) | Unloaded(name):
                self.told.discard(name)

    def asked_for(self, event: Event, action: Action) -> bool:
        """An operator has asked for it, or the engine neither sleeps nor answers and has to go."""
        return action.model == self.due or (isinstance(event, Ordered | SleepFailed) and event.model == action.model)

    def decided(self, event: Event, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Refuse):
                self._served(action.model)

    def rank(self, name: str) -> tuple[float, float, str]:
        """By priority, to which each `ageing_s` of waiting adds one, then by age."""
        ageing_s = self.w.limits.ageing_s
        gained = int((self.w.now - self.since[name]) / ageing_s) if ageing_s else math.inf
        return -self.w.models[name].priority - gained, self.since[name], name

    def in_order(self) -> list[str]:
        """Who waits for room."""
        waits = [n for n in NAMES if self.claimed(n) and self.w.stage(n) in (Stage.STOPPED, Stage.ASLEEP)]
        return sorted(waits, key=self.rank)

    def aged(self, name: str) -> bool:
        return self.w.now - self.since[name] >= self.w.limits.ageing_s


@always
@lives
@example(seed=506365, steps=31)
def test_one_load_or_wake_per_model_at_a_time_and_the_books_agree(seed: int, steps: int) -> None:
    watched(Watch, seed, steps)  # the world itself minds


class NothingInUseGoes(Queue):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.in_flight: dict[str, int] = {}
        self.arrived: dict[str, int] = {}
        self.up_since: dict[str, float] = {}
        self.granted: dict[str, float] = {}
        self.pinned: set[str] = set()

    def hears(self, event: Event) -> None:
        super().hears(event)
        match event:
            case Loaded(name) | Woken(name):
                self.up_since[name] = self.w.now
                self.in_flight[name] = self.arrived[name] = 0
            case StillBusy(name):
                self.up_since[name] = self.w.now
                self.in_flight[name] = 1
            case Activity(name, in_flight, arrived):
                if arrived > self.arrived.get(name, 0):
                    self.granted.pop(name, None)  # it has arrived
                self.in_flight[name], self.arrived[name] = in_flight, arrived
            case Ordered(name, Order.PIN):
                self.pinned.add(name)
            case Ordered(name, Order.UNPIN | Order.SLEEP | Order.UNLOAD):
                self.pinned.discard(name)

    def decided(self, event: Event, actions: list[Action]) -> None:
        super().decided(event, actions)
        for action in actions:
            name = action.model
            if isinstance(action, Grant):
                self.granted[name] = self.w.now
            if not isinstance(action, GOES) or isinstance(event, SleepFailed):
                continue
            engine = self.w.engines.get(name)
            if engine and engine.stage is Stage.ASLEEP and self.claimed(name):
                # The one exception; that it comes up again is a property below.
                assert self.aged(self.in_order()[0]), "waited for, and no aged one waits before it"
                continue
            assert not self.w.waiting[name], "a request waits for it"
            if self.asked_for(event, action):
                continue
            assert name not in self.ordered, "an operator waits for it"
            assert name not in self.pinned, "it is pinned"
            if isinstance(action, Abandon):
                continue
            assert engine, "it is not there"
            assert engine.stage not in RISING, "it is on its way up"
            if engine.stage is Stage.ASLEEP:
                continue
            just_granted = self.w.now - self.granted.get(name, -1e9) < LEASE_S
            if action.drain:
                assert self.w.now - self.up_since[name] >= LEASE_S or not just_granted, (
                    "who it came up for has not come"
                )
                assert self.aged(self.in_order()[0]), "drained for one that has not waited long"
            else:
                assert not self.in_flight[name], "it is in use"
                assert not just_granted, "it has just been granted"


@pytest.mark.case(7)
@always
@lives
@example(seed=6058, steps=60)
def test_nothing_in_use_rising_waited_for_just_granted_or_pinned_is_put_away(seed: int, steps: int) -> None:
    watched(NothingInUseGoes, seed, steps)


class Purposeful(Queue):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.used_at: dict[str, float] = {}

    def hears(self, event: Event) -> None:
        super().hears(event)
        match event:
            case Activity(name) | Loaded(name) | Woken(name) | StillBusy(name):
                self.used_at[name] = self.w.now
            case Ordered(name, Order.LOAD | Order.PIN):
                self.used_at[name] = self.w.now

    def decided(self, event: Event, actions: list[Action]) -> None:
        super().decided(event, actions)
        for action in actions:
            if isinstance(action, Grant):
                self.used_at[action.model] = self.w.now
        made_room = [
            action
            for action in actions
            if isinstance(action, GOES) and not self.asked_for(event, action) and not self._idle_for_long(action)
        ]
        over = self.w.policy.used_bytes() > self.w.limits.memory_bytes
        if not made_room or over:
            return
        assert self.w.limits.evicts, "this pool lets nothing go for another"
        newcomer = self.in_order()[0]
        assert self._lacks(newcomer), "there was room"
        assert self._will_fit(newcomer), f"{newcomer} does not fit then"

    def _idle_for_long(self, action: Action) -> bool:
        model = self.w.models[action.model]
        unused_s = self.w.now - self.used_at.get(model.id, -1e9)
        if isinstance(action, Sleep):
            return model.idle_sleep_s is not None and unused_s >= model.idle_sleep_s
        return isinstance(action, Unload) and unused_s >= model.idle_unload_s

    def _needs(self, name: str) -> tuple[int, int]:
        """Accelerator and host memory that it takes to come up from where it is."""
        model = self.w.models[name]
        if self.w.stage(name) is Stage.STOPPED:
            return self.w.known[name], model.process_bytes
        return self.w.known[name] - model.asleep_bytes, 0

    def _lacks(self, newcomer: str) -> bool:
        limits, policy = self.w.limits, self.w.policy
        needs, host_needs = self._needs(newcomer)
        no_host = limits.host_bytes and policy.used_host_bytes() + host_needs > limits.host_bytes
        return bool(policy.used_bytes() + needs > limits.memory_bytes or no_host)

    def _will_fit(self, newcomer: str) -> bool:
        """When all that goes is gone, and so is what only waits to sleep for the host memory of one that is ended."""
        if self._fits_beside(newcomer, set()):
            return True
        comes = any(self.w.stage(name) is Stage.UNLOADING for name in NAMES)
        later = {name for name in NAMES if self.w.stage(name) is Stage.AWAKE and self.w.models[name].sleeps}
        return comes and self._fits_beside(newcomer, later)

    def _fits_beside(self, newcomer: str, gone: set[str]) -> bool:
        used, host = self._needs(newcomer)
        for name in NAMES:
            model, stage = self.w.models[name], self.w.stage(name)
            if stage in (Stage.STOPPED, Stage.UNLOADING) or name in gone:
                continue
            asleep = stage in (Stage.ASLEEP, Stage.FALLING_ASLEEP)
            used += model.asleep_bytes if asleep else self.w.known[name]
            host += model.process_bytes + (model.host_bytes if asleep or stage is Stage.WAKING else 0)
        limits = self.w.limits
        return used <= limits.memory_bytes and (host <= limits.host_bytes or not limits.host_bytes)


@always
@lives
@example(seed=1219844179, steps=44)
def test_models_go_only_to_make_room_for_one_that_then_fits_or_idle_or_ordered(seed: int, steps: int) -> None:
    watched(Purposeful, seed, steps)


class WithinLimits(Watch):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.used = 0

    def hears(self, event: Event) -> None:
        self.used = self.w.policy.used_bytes()

    def decided(self, event: Event, actions: list[Action]) -> None:
        used, limits = self.w.policy.used_bytes(), self.w.limits
        if any(isinstance(action, Load | Wake) for action in actions):
            assert used <= limits.memory_bytes, "brought up without room"
        if not isinstance(event, Loaded):
            assert used <= max(self.used, limits.memory_bytes), "more than there is, and nothing was measured"
        if limits.host_bytes:
            assert self.w.policy.used_host_bytes() <= limits.host_bytes, "more of the host than there is"
        else:
            assert not any(isinstance(action, Sleep) for action in actions), "there is no host memory to sleep in"


def calm(w: World) -> None:
    """Everything heals, every request ends, every pin is lifted."""
    w.heal()
    for name in NAMES:
        w.order(name, Order.UNPIN)
        for _ in range(w.engines[name].in_flight if name in w.engines else 0):
            w.finish(name)


@pytest.mark.case(74)
@always
@lives
def test_memory_is_never_over_the_limits_but_by_a_measured_size_that_is_then_shed(seed: int, steps: int) -> None:
    w = watched(WithinLimits, seed, steps)
    calm(w)
    for _ in range(80):
        if w.policy.used_bytes() <= w.limits.memory_bytes:
            return
        w.run(2, step=1)
    pytest.fail("what was measured to be too much is never shed")


class RefusedAtOnce(Watch):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.failed: dict[str, int] = {}
        self.back_at: dict[str, float] = {}
        self.stages: dict[str, Stage] = {}

    def hears(self, event: Event) -> None:
        self.stages = {name: self.w.stage(name) for name in NAMES}
        match event:
            case LoadFailed(name) if self.stages[name] is Stage.LOADING:
                factor = min(2 ** self.failed.get(name, 0), MAX_BACKOFF_FACTOR)
                self.failed[name] = self.failed.get(name, 0) + 1
                self.back_at[name] = self.w.now + self.w.limits.backoff_s * factor
            case Loaded(name):
                self.failed[name], self.back_at[name] = 0, 0.0

    def decided(self, event: Event, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Load):
                assert not self._never_fits(action.model), "loaded though it cannot fit"
                assert self.w.now >= self.back_at.get(action.model, 0.0), "loaded again too soon"
        if not isinstance(event, Wanted):
            return
        name = event.model
        down = self.stages[name] is Stage.STOPPED
        if self._never_fits(name) or (down and self.w.now < self.back_at.get(name, 0.0)):
            (refusal,) = [action for action in actions if action.model == name]
            assert isinstance(refusal, Refuse)
            assert refusal.code == ("never_fits" if self._never_fits(name) else "load_failed")
            assert refusal.retry_after_s > 0

    def _never_fits(self, name: str) -> bool:
        limits = self.w.limits
        too_large = self.w.known[name] > limits.memory_bytes
        return too_large or 0 < limits.host_bytes < self.w.models[name].process_bytes


@always
@lives
def test_what_can_never_fit_is_refused_at_once_and_what_has_failed_until_its_backoff_is_over(
    seed: int, steps: int
) -> None:
    watched(RefusedAtOnce, seed, steps)


class FailureIsContained(Queue):
    """Compares a failed load with what stood before it, where nobody else waits for the room that it leaves."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.before: dict[str, Stage] = {}

    def hears(self, event: Event) -> None:
        super().hears(event)
        self.before = {name: self.w.stage(name) for name in NAMES}

    def decided(self, event: Event, actions: list[Action]) -> None:
        super().decided(event, actions)
        if not isinstance(event, LoadFailed) or self.before[event.model] is not Stage.LOADING:
            return
        assert self.w.stage(event.model) is Stage.STOPPED
        assert all(action.model == event.model for action in actions if getattr(action, "code", "") == "load_failed")
        came = {action.model for action in actions if isinstance(action, Load | Wake)}
        if not came and not self.in_order() and self.w.policy.used_bytes() <= self.w.limits.memory_bytes:
            assert not [action for action in actions if not isinstance(action, Refuse)]
            assert all(self.w.stage(name) is self.before[name] for name in NAMES if name != event.model)


@always
@lives
def test_failed_load_changes_nothing_for_the_models_that_run(seed: int, steps: int) -> None:
    watched(FailureIsContained, seed, steps)


class InOrder(Queue):
    """`asks` is the queue as it was when the decision was made: who comes up now is still in it."""

    def decided(self, event: Event, actions: list[Action]) -> None:
        super().decided(event, actions)
        behind = self.in_order()
        assert self.w.policy.places(self.w.now) == behind, "another order"
        for action in actions:
            if isinstance(action, Load | Wake) and behind:
                first = behind[0]
                assert not self.aged(first) or self._ranks_before(action.model, first), (
                    f"{action.model} came up before {first}, which has waited long"
                )

    def _ranks_before(self, name: str, other: str) -> bool:
        return self.rank(name) < self.rank(other)


@always
@lives
def test_models_get_room_by_priority_and_age(seed: int, steps: int) -> None:
    watched(InOrder, seed, steps)


class Forlorn(Queue):
    def decided(self, event: Event, actions: list[Action]) -> None:
        super().decided(event, actions)
        for action in actions:
            if isinstance(action, Abandon) and not self.asked_for(event, action):
                assert not self.claimed(action.model), "somebody waits for it"
                gone_s = self.w.now - self.left_at.get(action.model, -1e9)
                assert gone_s >= self.w.limits.grace_s, "who wanted it has only just left"
                assert self.in_order(), "nobody waits for its room"


@always
@lives
def test_load_is_given_up_only_where_nobody_wants_it_and_somebody_waits_for_its_room(seed: int, steps: int) -> None:
    watched(Forlorn, seed, steps)


class Repaired(Watch):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.sleepless: set[str] = set()

    def decided(self, event: Event, actions: list[Action]) -> None:
        assert not [a for a in actions if isinstance(a, Sleep) and a.model in self.sleepless], "it has failed to before"
        if not isinstance(event, SleepFailed | WakeFailed):
            return
        name = event.model
        self.sleepless.add(name)
        assert Refuse not in {type(action) for action in actions if action.model == name}
        if isinstance(event, SleepFailed):
            assert Unload(name) in actions
        elif self.w.waiting[name]:
            assert Load(name) in actions or name in self.w.policy.places(self.w.now)


@always
@lives
def test_failed_wake_or_sleep_is_repaired_and_who_waits_is_kept(seed: int, steps: int) -> None:
    watched(Repaired, seed, steps)


class Wished(Queue):
    def decided(self, event: Event, actions: list[Action]) -> None:
        super().decided(event, actions)
        for action in actions:
            if isinstance(action, Load | Wake):
                assert self.claimed(action.model)


@always
@lives
def test_nothing_comes_up_that_nobody_wants(seed: int, steps: int) -> None:
    watched(Wished, seed, steps)


@always
@lives
def test_everybody_is_granted_or_refused_in_bounded_time_whatever_the_traffic(seed: int, steps: int) -> None:
    w = watched(Watch, seed, steps)
    w.heal()
    rng = random.Random(seed)
    busy = [name for name in NAMES if rng.random() < 0.5]
    limits, times = w.limits, w.times
    waits = {name for name in NAMES if w.waiting[name]}
    turn_s = 2 * limits.ageing_s + limits.min_residency_s + LEASE_S + times.load_s + times.hang_s + 5
    end = w.now + len(NAMES) * turn_s
    answered = len(w.log)
    while waits and w.now < end:
        for name in busy:
            if not w.begin(name) and not w.waiting[name]:
                w.want(name)
        w.run(1, step=0.5)
        for name in NAMES:
            # Under traffic requests overlap; one that closes has only so many to end.
            engine = w.engines.get(name)
            while engine and engine.in_flight > (name in busy and engine.stage is Stage.AWAKE):
                w.finish(name)
        waits -= {action.model for _, action in w.log[answered:] if isinstance(action, Grant | Refuse)}
        answered = len(w.log)
    assert not waits, "they wait for ever"


@always
@lives
def test_same_events_give_the_same_decisions_in_whatever_order_the_models_are_configured(seed: int, steps: int) -> None:
    logs = []
    for shuffled in (False, True):
        rng = random.Random(seed)
        w = random_world(rng)
        models = list(w.models.values())
        if shuffled:
            models.reverse()
        other = World(models, w.limits, w.times, at=w.now)
        other.sizes = w.sizes
        live(other, rng, steps)
        logs.append(other.log)
    assert logs[0] == logs[1]
