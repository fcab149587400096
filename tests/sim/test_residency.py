"""serve_app.residency.policy under a simulated clock: what always holds, and the field's reports."""

import dataclasses
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve_app.residency.events import (
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
    Refuse,
    Stage,
    StillBusy,
    Tick,
    Unload,
    Unloaded,
    Unwanted,
    Wanted,
)
from serve_app.residency.policy import LEASE_S, MAX_BACKOFF_FACTOR, Residency

TICK_S = 0.25


@dataclasses.dataclass(slots=True)
class Running:
    """One engine of the simulated world."""

    ready_at: float
    in_flight: int = 0
    arrived: int = 0
    closing: bool = False
    drains: bool = False
    gone_at: float | None = None


class World:
    """Engines that do what the policy says, and a record of everything. Time moves only by `run`.

    `load_s` is each load's time; a model in `broken` fails at the end of its load. `stuck_closed` keeps an
    unload from ending. The counts that the policy is told are exact, and told at once.
    """

    def __init__(self, models: list[LazyModel], limits: Limits, load_s: float = 3.0, at: float = 0.0) -> None:
        self.policy = Residency(models, limits)
        self.models = {model.id: model for model in models}
        self.limits = limits
        self.load_s = load_s
        self.unload_s = 0.5
        self.now = at
        self.engines: dict[str, Running] = {}
        self.broken: set[str] = set()
        self.waiting: dict[str, int] = dict.fromkeys(self.models, 0)
        self.log: list[tuple[float, Action]] = []
        self.hear: Callable[[Event], None] = lambda event: None
        self.check: Callable[[Event, Action], None] = lambda event, action: None

    # What clients do

    def want(self, model: str) -> None:
        self.waiting[model] += 1
        self.tell(Wanted(model))

    def leave(self, model: str) -> None:
        if self.waiting[model]:
            self.waiting[model] -= 1
            self.tell(Unwanted(model))

    def begin(self, model: str) -> bool:
        """A request arrives at the engine; it is refused where none runs or it is closing."""
        engine = self.engines.get(model)
        if engine is None or engine.closing or self.now < engine.ready_at:
            return False
        engine.in_flight += 1
        engine.arrived += 1
        self.tell(Activity(model, engine.in_flight, engine.arrived))
        return True

    def begin_unseen(self, model: str) -> bool:
        """A request that the policy has not heard of yet."""
        engine = self.engines.get(model)
        if engine is None or engine.closing or self.now < engine.ready_at:
            return False
        engine.in_flight += 1
        engine.arrived += 1
        return True

    def finish(self, model: str) -> None:
        engine = self.engines.get(model)
        if engine and engine.in_flight:
            engine.in_flight -= 1
            self.tell(Activity(model, engine.in_flight, engine.arrived))

    def die(self, model: str) -> None:
        engine = self.engines.get(model)
        if engine and self.now >= engine.ready_at and not engine.closing:
            del self.engines[model]
            self.tell(Died(model, "killed"))

    # What happens

    def tell(self, event: Event) -> None:
        self.hear(event)
        actions = self.policy.handle(event, self.now)
        for action in actions:
            self.check(event, action)
            self.log.append((self.now, action))
            if isinstance(action, Grant | Refuse):
                self.waiting[action.model] = 0
        for action in actions:
            self._obey(action)

    def _obey(self, action: Action) -> None:
        match action:
            case Load(model):
                assert model not in self.engines, "a second load of a model that is not stopped"
                self.engines[model] = Running(ready_at=self.now + self.load_s)
            case Unload(model, drain):
                engine = self.engines[model]
                if engine.in_flight and not drain:
                    self.tell(StillBusy(model))
                    self.tell(Activity(model, engine.in_flight, engine.arrived))
                    return
                engine.closing, engine.drains = True, drain
                engine.gone_at = self.now + self.unload_s
            case Grant(model):
                assert model in self.engines

    def run(self, seconds: float, step: float = TICK_S) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + step)
            for model, engine in list(self.engines.items()):
                if (
                    engine.closing
                    and not engine.in_flight
                    and engine.gone_at is not None
                    and self.now >= engine.gone_at
                ):
                    del self.engines[model]
                    self.tell(Unloaded(model))
                elif self.now >= engine.ready_at and self.policy.stage(model) is Stage.LOADING:
                    if model in self.broken:
                        del self.engines[model]
                        self.tell(LoadFailed(model, "no weights"))
                    else:
                        self.tell(Loaded(model))
            self.tell(Tick())

    def actions(self, kind: type[Action], model: str | None = None) -> list[float]:
        """When actions of this kind were taken."""
        return [at for at, action in self.log if type(action) is kind and model in (None, action.model)]

    def stage(self, model: str) -> Stage:
        return self.policy.stage(model)


LIMITS = Limits(memory_bytes=10, min_residency_s=20, ageing_s=60, backoff_s=10)


def model(name: str, memory: int = 10, priority: int = 0, idle_unload_s: float = 600) -> LazyModel:
    return LazyModel(name, memory, priority, idle_unload_s)


def world(*models: LazyModel, **limits: float) -> World:
    return World(list(models) or [model("a"), model("b")], dataclasses.replace(LIMITS, **limits))


def awake(where: World, *names: str) -> World:
    for name in names:
        where.want(name)
    where.run(where.load_s + TICK_S)
    assert all(where.stage(name) is Stage.AWAKE for name in names)
    return where


# The field's reports


def test_model_that_streams_is_not_evicted_and_the_newcomer_gets_its_room_after_it() -> None:
    w = awake(world(), "a")
    w.begin("a")
    w.run(30)
    w.want("b")
    w.run(20)
    assert w.stage("a") is Stage.AWAKE
    w.finish("a")
    w.run(10)
    assert (w.stage("a"), w.stage("b")) == (Stage.STOPPED, Stage.AWAKE)


def test_loaded_model_is_not_evicted_before_its_waiter_is_served() -> None:
    w = world(min_residency_s=0)
    w.want("a")
    w.run(0.1)
    w.want("b")
    w.run(w.load_s)
    assert w.actions(Grant, "a")
    assert w.stage("a") is Stage.AWAKE
    w.run(LEASE_S - 1)
    assert w.begin("a")
    w.run(5)
    w.finish("a")
    w.run(10)
    assert w.actions(Grant, "b")


def test_burst_on_a_cold_model_starts_one_load_and_grants_all_at_once() -> None:
    w = world()
    for _ in range(20):
        w.want("a")
        w.run(0.1)
    w.run(5)
    assert (len(w.actions(Load)), len(w.actions(Grant)), w.waiting["a"]) == (1, 1, 0)


def test_thrash_between_two_models_is_bounded_by_the_residency_time() -> None:
    w = world()
    for _ in range(600):
        for name in ("a", "b"):
            if not w.waiting[name] and not w.begin(name):
                w.want(name)
        w.run(0.5)
        for name in ("a", "b"):
            w.finish(name)
        w.run(0.5)
    assert 2 < len(w.actions(Load)) <= 600 / LIMITS.min_residency_s + 1


def test_model_that_can_never_fit_is_refused_at_once_and_evicts_nothing() -> None:
    w = awake(world(model("a"), model("huge", memory=11)), "a")
    w.want("huge")
    assert isinstance(w.log[-1][1], Refuse)
    assert w.log[-1][1].code == "never_fits"
    w.run(1000)
    assert w.actions(Load, "huge") == []


def test_failed_load_takes_nothing_with_it() -> None:
    w = awake(world(model("a", 5), model("b", 5)), "a")
    w.begin("a")
    w.broken.add("b")
    w.want("b")
    w.run(10)
    assert (w.stage("a"), w.stage("b"), w.policy.used_bytes()) == (Stage.AWAKE, Stage.STOPPED, 5)
    assert w.actions(Unload) == []
    assert w.policy.failure("b") == "no weights"


def test_failed_model_is_refused_until_its_backoff_is_over_then_loads_again() -> None:
    w = world()
    w.broken.add("a")
    w.want("a")
    w.run(w.load_s + TICK_S)
    w.want("a")
    (_, refusal) = w.log[-1]
    assert isinstance(refusal, Refuse)
    assert (refusal.code, refusal.reason) == ("load_failed", "no weights")
    assert 0 < refusal.retry_after_s <= LIMITS.backoff_s
    w.run(refusal.retry_after_s)
    w.broken.clear()
    w.want("a")
    w.run(5)
    assert (w.stage("a"), w.policy.failure("a")) == (Stage.AWAKE, "")


def test_backoff_doubles_up_to_its_limit() -> None:
    w = world()
    w.broken.add("a")
    waits = []
    for _ in range(9):
        w.want("a")
        w.run(w.load_s + TICK_S)
        (refusal,) = [action for _, action in w.log[-1:] if isinstance(action, Refuse)]
        waits.append(refusal.retry_after_s / LIMITS.backoff_s)
        w.run(refusal.retry_after_s + 1)
    assert waits == [1, 2, 4, 8, 16, 32, 32, 32, MAX_BACKOFF_FACTOR]


def test_client_that_leaves_does_not_leave_a_model_loading_for_ever() -> None:
    w = world(model("a", idle_unload_s=60), model("b"))
    w.want("a")
    w.leave("a")
    assert w.stage("a") is Stage.LOADING
    w.run(10)
    assert w.stage("a") is Stage.AWAKE
    w.run(70)
    assert w.stage("a") is Stage.STOPPED


def test_client_that_leaves_the_queue_is_not_loaded_for() -> None:
    w = awake(world(), "a")
    w.begin("a")
    w.want("b")
    w.leave("b")
    w.finish("a")
    w.run(100)
    assert (w.stage("a"), w.actions(Load, "b")) == (Stage.AWAKE, [])


def test_idle_timer_does_not_run_during_the_load() -> None:
    w = world(model("a", idle_unload_s=30))
    w.load_s = 90
    w.want("a")
    w.run(91)
    assert (w.stage("a"), len(w.actions(Grant))) == (Stage.AWAKE, 1)
    assert w.begin("a")


def test_idle_model_is_unloaded_after_its_time_and_a_long_request_is_no_idleness() -> None:
    w = awake(world(model("a", idle_unload_s=30)), "a")
    w.begin("a")
    w.run(500)
    assert w.stage("a") is Stage.AWAKE
    w.finish("a")
    w.run(29)
    assert w.stage("a") is Stage.AWAKE
    w.run(2)
    assert w.stage("a") is Stage.STOPPED


def test_request_that_races_the_unload_stops_it_and_nothing_is_lost() -> None:
    w = awake(world(model("a", idle_unload_s=30)), "a")
    w.run(20)
    w.begin_unseen("a")
    w.run(60)
    assert (w.stage("a"), w.engines["a"].in_flight) == (Stage.AWAKE, 1)
    w.finish("a")
    w.run(40)
    assert w.stage("a") is Stage.STOPPED


def test_model_wanted_while_it_is_unloaded_is_loaded_again() -> None:
    w = awake(world(model("a", idle_unload_s=30)), "a")
    while w.stage("a") is not Stage.UNLOADING:
        w.run(TICK_S)
    w.want("a")
    w.run(10)
    assert (w.stage("a"), len(w.actions(Load)), w.waiting["a"]) == (Stage.AWAKE, 2, 0)


def test_waiter_of_an_unload_that_found_a_request_is_granted_at_once() -> None:
    policy = Residency([model("a", idle_unload_s=1)], LIMITS)
    policy.handle(Wanted("a"), 0)
    policy.handle(Loaded("a"), 1)
    assert policy.handle(Tick(), 100) == [Unload("a")]
    assert policy.handle(Wanted("a"), 100) == []
    assert policy.handle(StillBusy("a"), 100.1) == [Grant("a")]


def traffic_of_requests(w: World) -> None:
    """Requests that always overlap, so that the model is never idle."""
    w.begin("a")
    w.run(0.5)
    if w.engines.get("a") and w.engines["a"].in_flight > 1:
        w.finish("a")


def traffic_of_acquires(w: World) -> None:
    """Short requests that each ask for the model first."""
    if not w.waiting["a"]:
        w.want("a")
    w.begin("a")
    w.run(0.1)
    w.finish("a")
    w.run(0.4)


def traffic_of_grants(w: World) -> None:
    """Somebody asks for the model again and again, and no request of theirs arrives."""
    if not w.waiting["a"]:
        w.want("a")
    w.run(0.5)


def traffic_unseen(w: World) -> None:
    """Requests so short that the policy never hears of them, but one is there whenever it looks."""
    if w.engines.get("a") and not w.engines["a"].in_flight:
        w.begin_unseen("a")
    w.run(0.5)


@pytest.mark.parametrize("traffic", [traffic_of_requests, traffic_of_acquires, traffic_of_grants, traffic_unseen])
@pytest.mark.parametrize("start", [0.0, 1000.0])
def test_queued_model_is_not_starved_by_traffic_on_a_loaded_one(traffic: Callable[[World], None], start: float) -> None:
    w = World([model("a"), model("b")], LIMITS, at=start)
    awake(w, "a")
    w.want("b")
    asked = w.now
    while not w.actions(Grant, "b") and w.now < asked + 1000:
        traffic(w)
        if w.stage("a") is Stage.UNLOADING and w.engines["a"].in_flight:
            w.engines["a"].in_flight = 0  # what was running when it closed comes to its end
    bound = LIMITS.ageing_s + LIMITS.min_residency_s + LEASE_S + w.load_s + 5
    assert w.now - asked <= bound


def test_small_model_does_not_overtake_one_that_waits_for_much_room_for_ever() -> None:
    w = awake(world(model("a", 5), model("big", 10), model("s1", 5), model("s2", 5)), "a")
    w.begin("a")
    w.want("big")
    w.run(1)
    w.want("s1")
    w.run(30)
    # In the meantime it may use what is free.
    assert (w.stage("big"), w.stage("s1")) == (Stage.STOPPED, Stage.AWAKE)
    w.finish("a")
    w.run(5)
    assert w.stage("big") is Stage.AWAKE


def test_model_that_fits_is_not_hindered_by_what_is_loaded() -> None:
    w = awake(world(model("a", 4), model("b", 6)), "a")
    w.want("b")
    w.run(5)
    assert (w.stage("a"), w.stage("b")) == (Stage.AWAKE, Stage.AWAKE)


def test_only_what_must_go_is_evicted() -> None:
    w = awake(world(model("a-old", 2), model("large", 8), model("new", 8)), "a-old", "large")
    w.run(30)
    w.want("new")
    w.run(10)
    assert w.actions(Unload, "large")
    assert w.stage("a-old") is Stage.AWAKE


def test_important_and_recently_used_models_stay_longest() -> None:
    w = world(model("vip", 4, priority=1), model("old", 3), model("fresh", 3), model("new", 3))
    awake(w, "vip", "old", "fresh")
    w.run(30)
    for name in ("vip", "old", "fresh"):
        w.begin(name)
        w.finish(name)
        w.run(1)
    w.want("new")
    w.run(10)
    assert [action.model for _, action in w.log if isinstance(action, Unload)] == ["old"]


def test_model_that_dies_is_loaded_again_by_the_next_request() -> None:
    w = awake(world(), "a")
    w.begin("a")
    w.die("a")
    assert (w.stage("a"), w.policy.used_bytes()) == (Stage.STOPPED, 0)
    w.want("a")
    w.run(5)
    assert w.stage("a") is Stage.AWAKE


def test_death_of_a_model_makes_room_for_who_waits() -> None:
    w = awake(world(), "a")
    w.begin("a")
    w.want("b")
    w.die("a")
    assert w.stage("b") is Stage.LOADING


# What always holds, whatever happens in whatever order

NAMES = "abcd"


def steps(seed: int) -> Iterator[tuple[str, str, float]]:
    """A random life: what clients and engines do."""
    rng = random.Random(seed)
    weights = {
        "want": 6,
        "begin": 6,
        "unseen": 2,
        "finish": 7,
        "leave": 2,
        "die": 1,
        "break": 1,
        "mend": 1,
        "run": 10,
    }
    for kind in rng.choices(list(weights), list(weights.values()), k=rng.randint(10, 60)):
        yield kind, rng.choice(NAMES), rng.choice([0.25, 0.25, 1, 3, 10, 40])


def random_world(seed: int) -> World:
    rng = random.Random(seed)
    models = [LazyModel(name, rng.randint(1, 11), rng.randint(0, 1), rng.choice([1, 10, 60, 600])) for name in NAMES]
    limits = Limits(
        memory_bytes=10,
        min_residency_s=rng.choice([0, 5, 20]),
        ageing_s=rng.choice([0, 10, 60]),
        backoff_s=rng.choice([1, 10]),
    )
    return World(models, limits, load_s=rng.choice([0.25, 1, 5]), at=rng.choice([0.0, 1000.0]))


def live(w: World, seed: int) -> None:
    for kind, name, seconds in steps(seed):
        match kind:
            case "want":
                w.want(name)
            case "begin":
                w.begin(name)
            case "unseen":
                w.begin_unseen(name)
            case "finish":
                w.finish(name)
            case "leave":
                w.leave(name)
            case "die":
                w.die(name)
            case "break":
                w.broken.add(name)
            case "mend":
                w.broken.discard(name)
            case "run":
                w.run(seconds, step=max(TICK_S, seconds / 10))
        used = sum(w.models[name].memory_bytes for name in w.engines)
        assert used <= w.limits.memory_bytes, "more memory in use than there is"
        assert w.policy.used_bytes() == used, "memory is not accounted for as it is"


always = settings(max_examples=2000, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
lives = given(st.integers(0, 2**32))


@always
@lives
def test_one_load_per_model_at_a_time_and_memory_never_exceeds_the_limit(seed: int) -> None:
    live(random_world(seed), seed)


@always
@lives
def test_model_in_use_loading_waited_for_or_just_granted_is_never_unloaded(seed: int) -> None:
    w = random_world(seed)
    granted: dict[str, float] = {}
    told: dict[str, int] = {}
    awake_since: dict[str, float] = {}
    arrived: dict[str, int] = {}

    def hear(event: Event) -> None:
        if isinstance(event, Loaded | StillBusy):
            awake_since[event.model] = w.now
        if isinstance(event, Activity):
            told[event.model] = event.in_flight
            if event.arrived > arrived.get(event.model, 0):
                granted.pop(event.model, None)  # it has arrived
            arrived[event.model] = event.arrived

    def check(event: Event, action: Action) -> None:
        if isinstance(action, Grant):
            granted[action.model] = w.now
        if isinstance(action, Load):
            told[action.model] = arrived[action.model] = 0
            granted.pop(action.model, None)
        if isinstance(action, Unload):
            name = action.model
            assert w.now >= w.engines[name].ready_at, "unloaded while it loads"
            assert not w.waiting[name], "unloaded while a request waits for it"
            assert w.now - awake_since[name] >= LEASE_S or name not in granted, "unloaded before who waited came"
            if not action.drain:
                assert not told[name], "unloaded while in use"
                assert w.now - granted.get(name, -1e9) >= LEASE_S, "unloaded right after it was granted"

    w.hear, w.check = hear, check
    live(w, seed)


@always
@lives
def test_unloading_only_makes_room_that_is_needed_or_ends_idleness(seed: int) -> None:
    w = random_world(seed)
    idle_since: dict[str, float] = {}

    def hear(event: Event) -> None:
        if isinstance(event, Activity | Loaded | StillBusy):
            idle_since[event.model] = w.now

    def check(event: Event, action: Action) -> None:
        if isinstance(action, Grant):
            idle_since[action.model] = w.now
        if isinstance(action, Unload):
            timed_out = w.now - idle_since.get(action.model, 0) >= w.models[action.model].idle_unload_s
            wanted = [
                w.models[name].memory_bytes
                for name in NAMES
                if w.waiting[name] and w.policy.stage(name) is Stage.STOPPED
            ]
            free = w.limits.memory_bytes - w.policy.used_bytes()
            freed = sum(w.models[n].memory_bytes for n in NAMES if w.policy.stage(n) is Stage.UNLOADING)
            makes_room = any(free < size <= free + freed for size in wanted)
            assert timed_out or makes_room, "unloaded for nothing"

    w.hear, w.check = hear, check
    live(w, seed)


@always
@lives
def test_failing_loads_change_nothing_for_the_models_that_run(seed: int) -> None:
    w = random_world(seed)

    def check(event: Event, action: Action) -> None:
        if isinstance(event, LoadFailed) and isinstance(action, Refuse):
            assert action.model == event.model

    w.check = check
    before: dict[str, Stage] = {}
    original = w.tell

    def tell(event: Event) -> None:
        if isinstance(event, LoadFailed):
            before.clear()
            before.update({name: w.stage(name) for name in NAMES if name != event.model})
            marked = len(w.log)
            original(event)
            moved = {action.model for _, action in w.log[marked:] if isinstance(action, Load | Unload)}
            assert all(w.stage(name) is stage for name, stage in before.items() if name not in moved)
            assert w.stage(event.model) is Stage.STOPPED
            return
        original(event)

    w.tell = tell  # type: ignore[method-assign]
    live(w, seed)


@always
@lives
def test_what_can_never_fit_or_has_just_failed_is_refused_at_once(seed: int) -> None:
    w = random_world(seed)
    original = w.tell
    failed: dict[str, float] = {}

    def tell(event: Event) -> None:
        marked = len(w.log)
        stage = w.stage(event.model) if isinstance(event, Wanted) else None
        original(event)
        taken = [action for _, action in w.log[marked:]]
        if isinstance(event, LoadFailed):
            failed[event.model] = w.now
        if isinstance(event, Wanted):
            too_large = w.models[event.model].memory_bytes > w.limits.memory_bytes
            fresh = stage is Stage.STOPPED and w.now - failed.get(event.model, -1e9) < w.limits.backoff_s
            if too_large or fresh:
                (refusal,) = taken
                assert isinstance(refusal, Refuse)
                assert refusal.retry_after_s > 0

    w.tell = tell  # type: ignore[method-assign]
    live(w, seed)


@always
@lives
def test_everybody_who_waits_is_granted_or_refused_in_the_end(seed: int) -> None:
    w = random_world(seed)
    live(w, seed)
    w.broken.clear()
    for _ in range(60):
        for name in NAMES:
            for _ in range(w.engines[name].in_flight if name in w.engines else 0):
                w.finish(name)
        w.run(10)
        if not any(w.waiting.values()):
            break
    assert not any(w.waiting.values()), "somebody waits for ever"
    w.run(w.load_s + 1)
    ending = [name for name in NAMES if w.stage(name) is Stage.UNLOADING]
    w.run(w.unload_s + 1)
    assert not [name for name in NAMES if w.stage(name) is Stage.LOADING], "a load never ended"
    assert not [name for name in ending if w.stage(name) is not Stage.STOPPED], "an unload never ended"


@always
@lives
def test_models_get_room_in_the_order_in_which_they_were_first_waited_for(seed: int) -> None:
    w = random_world(seed)
    since: dict[str, float] = {}
    returned: set[str] = set()
    original = w.tell

    def tell(event: Event) -> None:
        if isinstance(event, Unwanted):
            returned.add(event.model)  # may keep its place for a moment: not compared
        if isinstance(event, Wanted) and event.model not in since and w.stage(event.model) is not Stage.AWAKE:
            since[event.model] = w.now
        original(event)
        for name in [name for name in since if not w.waiting[name]]:
            del since[name]

    def check(event: Event, action: Action) -> None:
        if isinstance(action, Load):
            earlier = [
                name
                for name, at in since.items()
                if action.model not in returned
                and at < since.get(action.model, w.now)
                and w.policy.stage(name) is Stage.STOPPED
                and w.waiting[name]
            ]
            assert not earlier, f"{action.model} got room before {earlier}"

    w.tell = tell  # type: ignore[method-assign]
    w.check = check
    live(w, seed)


def test_old_request_that_ends_does_not_end_the_lease_of_a_new_grant() -> None:
    w = awake(world(), "a")
    w.begin("a")
    w.run(30)
    w.want("b")
    w.want("a")
    w.finish("a")
    assert w.stage("a") is Stage.AWAKE
    assert w.begin("a")
    w.finish("a")
    w.run(5)
    assert w.actions(Grant, "b")


def test_waiter_that_asks_again_at_once_keeps_its_place_and_its_age() -> None:
    w = awake(world(model("a"), model("b"), model("c")), "a")
    w.begin("a")
    w.want("b")
    for _ in range(40):
        w.run(2)
        w.leave("b")
        w.want("b")
        if not w.waiting["c"]:
            w.want("c")
    assert w.stage("a") is Stage.UNLOADING
    w.finish("a")
    w.run(5)
    assert w.stage("b") is Stage.AWAKE


def test_nobody_is_drained_for_a_waiter_who_has_left() -> None:
    w = awake(world(), "a")
    w.begin("a")
    w.want("b")
    w.run(1)
    w.leave("b")
    w.run(200)
    assert w.stage("a") is Stage.AWAKE
    assert w.actions(Load, "b") == []
