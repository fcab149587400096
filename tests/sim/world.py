"""Engines that do what `serve_app.residency.policy` says, in simulated time, and a random life for them."""

import dataclasses
import random
from collections import deque

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
from serve_app.residency.policy import Residency

TICK_S = 0.25
RISING = (Stage.LOADING, Stage.WAKING)


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """How long everything takes. A load, wake or sleep that hangs is reported as failed after `hang_s`."""

    load_s: float = 3.0
    wake_s: float = 1.0
    sleep_s: float = 0.5
    unload_s: float = 0.5
    hang_s: float = 15.0


@dataclasses.dataclass(slots=True)
class Engine:
    """One engine of the simulated world. `copied`: it holds its weights in the host's memory."""

    stage: Stage
    since: float
    in_flight: int = 0
    arrived: int = 0
    copied: bool = False
    evicted_asleep: bool = False
    failed: bool = False
    dead: bool = False

    def enter(self, stage: Stage, now: float) -> None:
        self.evicted_asleep = stage is Stage.UNLOADING and self.stage is Stage.ASLEEP
        self.copied = stage in (Stage.FALLING_ASLEEP, Stage.ASLEEP, Stage.WAKING) or (
            stage is Stage.UNLOADING and self.copied
        )
        self.stage, self.since, self.failed = stage, now, False


class Watch:
    """Sees everything that the policy is told and what it answers. `decided` comes before anything is carried out."""

    def __init__(self, world: "World") -> None:
        self.w = world

    def hears(self, event: Event) -> None:
        pass

    def decided(self, event: Event, actions: list[Action]) -> None:
        pass


class World:
    """A replica without a GPU, and a record of everything. Time moves only by `run`.

    What is in `fails` ends in failure, what is in `hangs` does not end; `sizes` are what loads measure. Counts of
    requests are exact and told at once; that an engine was busy or has died is told a step later, as by `manager`.
    """

    def __init__(self, models: list[LazyModel], limits: Limits, times: Times | None = None, at: float = 0.0) -> None:
        self.policy = Residency(models, limits)
        self.models = {model.id: model for model in models}
        self.limits = limits
        self.times = times or Times()
        self.now = at
        self.engines: dict[str, Engine] = {}
        self.fails: set[tuple[str, Stage]] = set()
        self.hangs: set[tuple[str, Stage]] = set()
        self.sizes: dict[str, int] = {}
        self.known = {model.id: model.memory_bytes for model in models}
        self.waiting: dict[str, int] = dict.fromkeys(self.models, 0)
        self.log: list[tuple[float, Action]] = []
        self.watch = Watch(self)
        self._reports: deque[Event] = deque()

    # What clients and operators do

    def want(self, model: str) -> None:
        self.waiting[model] += 1
        self.tell(Wanted(model))

    def leave(self, model: str) -> None:
        if self.waiting[model]:
            self.waiting[model] -= 1
            self.tell(Unwanted(model))

    def begin(self, model: str, seen: bool = True) -> bool:
        """A request arrives at the engine; False where it is refused. Not `seen`: the policy does not hear of it."""
        engine = self.engines.get(model)
        if engine is None or engine.stage is not Stage.AWAKE or engine.dead:
            return False
        engine.in_flight += 1
        engine.arrived += 1
        if seen:
            self.tell(Activity(model, engine.in_flight, engine.arrived))
        return True

    def finish(self, model: str) -> None:
        engine = self.engines.get(model)
        if engine and engine.in_flight:
            engine.in_flight -= 1
            self.tell(Activity(model, engine.in_flight, engine.arrived))

    def order(self, model: str, order: Order) -> None:
        self.tell(Ordered(model, order))

    # What befalls engines

    def die(self, model: str) -> None:
        engine = self.engines.get(model)
        if engine and not engine.dead:
            engine.dead, engine.in_flight = True, 0
            self._reports.append(Died(model, "killed"))

    def heal(self) -> None:
        """From now on nothing fails or hangs."""
        self.fails.clear()
        self.hangs.clear()

    # What happens

    def tell(self, event: Event) -> None:
        if isinstance(event, Died):
            self._bury(event.model)
        self.watch.hears(event)
        actions = self.policy.handle(event, self.now)
        for action in actions:
            self.log.append((self.now, action))
            if isinstance(action, Grant | Refuse):
                self.waiting[action.model] = 0
        self.watch.decided(event, actions)
        for action in actions:
            self._obey(action)

    def _bury(self, model: str) -> None:
        # One that was on its way somewhere is reported by that.
        engine = self.engines.get(model)
        if engine and engine.dead and engine.stage in (Stage.AWAKE, Stage.ASLEEP):
            del self.engines[model]

    def _obey(self, action: Action) -> None:
        model = action.model
        engine = self.engines.get(model)
        match action:
            case Grant():
                assert engine, "granted what does not run"
                assert engine.stage is Stage.AWAKE, "granted what does not answer"
            case Load():
                assert engine is None, "a second load of a model that is not stopped"
                self.engines[model] = Engine(Stage.LOADING, self.now)
            case Wake():
                assert engine, "woken, but does not run"
                assert engine.stage is Stage.ASLEEP, "woken, but does not sleep"
                engine.enter(Stage.WAKING, self.now)
                engine.arrived = 0
            case Abandon():
                self._abandon(model, engine)
            case Sleep(_, drain):
                assert engine, "put to sleep, but does not run"
                assert engine.stage is Stage.AWAKE, "put to sleep, but is not awake"
                self._close(model, engine, Stage.FALLING_ASLEEP, drain)
            case Unload(_, drain):
                assert engine, "unloaded, but does not run"
                assert engine.failed or engine.stage in (Stage.AWAKE, Stage.ASLEEP), "unloaded on its way"
                self._close(model, engine, Stage.UNLOADING, drain)

    def _abandon(self, model: str, engine: Engine | None) -> None:
        # It may have ended a moment ago, and the report is on its way.
        reported = any(event.model == model for event in self._reports if isinstance(event, Loaded | LoadFailed))
        if engine is None:
            assert reported, "given up, but does not run"
            self._reports.append(Unloaded(model))
        else:
            assert reported or engine.stage is Stage.LOADING, "given up, but does not load"
            engine.enter(Stage.UNLOADING, self.now)

    def _close(self, model: str, engine: Engine, stage: Stage, drain: bool) -> None:
        if engine.in_flight and not drain:
            self._reports.append(StillBusy(model))
        else:
            engine.enter(stage, self.now)

    def run(self, seconds: float, step: float = TICK_S) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + step)
            for model, engine in list(self.engines.items()):
                if self._done(model, engine):
                    self._reports.append(self._end(model, engine))
            while self._reports:
                self._report(self._reports.popleft())
            self.tell(Tick())

    def _report(self, event: Event) -> None:
        self.tell(event)
        if isinstance(event, StillBusy) and (engine := self.engines.get(event.model)):
            # What was reported during the attempt was not heard.
            self.tell(Activity(event.model, engine.in_flight, engine.arrived))

    def _done(self, model: str, engine: Engine) -> bool:
        if engine.in_flight or engine.failed:
            return False
        took_s = self.now - engine.since
        if engine.stage in (Stage.AWAKE, Stage.ASLEEP):
            return False
        if engine.dead:
            return True
        if (model, engine.stage) in self.hangs:
            return engine.stage is not Stage.UNLOADING and took_s >= self.times.hang_s
        return took_s >= self._takes(engine.stage)

    def _takes(self, stage: Stage) -> float:
        match stage:
            case Stage.LOADING:
                return self.times.load_s
            case Stage.WAKING:
                return self.times.wake_s
            case Stage.FALLING_ASLEEP:
                return self.times.sleep_s
        return self.times.unload_s

    def _end(self, model: str, engine: Engine) -> Event:
        """What an engine was doing has come to its end, a good one or not."""
        at = (model, engine.stage)
        bad = engine.dead or at in self.fails or at in self.hangs
        match engine.stage:
            case Stage.FALLING_ASLEEP if bad:
                engine.failed = True
                return SleepFailed(model)
            case Stage.FALLING_ASLEEP:
                engine.enter(Stage.ASLEEP, self.now)
                return Slept(model)
            case Stage.LOADING | Stage.WAKING as stage if bad:
                del self.engines[model]
                return (LoadFailed if stage is Stage.LOADING else WakeFailed)(model, "no weights")
            case Stage.LOADING:
                engine.enter(Stage.AWAKE, self.now)
                self.known[model] = max(self.known[model], min(self.sizes.get(model, 0), self.limits.memory_bytes))
                return Loaded(model, self.times.load_s, self.sizes.get(model, 0))
            case Stage.WAKING:
                engine.enter(Stage.AWAKE, self.now)
                return Woken(model, self.times.wake_s)
        del self.engines[model]
        return Unloaded(model)

    # What can be seen

    def stage(self, model: str) -> Stage:
        return self.policy.stage(model)

    def actions(self, kind: type[Action], model: str | None = None) -> list[float]:
        """When actions of this kind were taken."""
        return [at for at, action in self.log if type(action) is kind and model in (None, action.model)]

    def used_bytes(self) -> int:
        """Accelerator memory that the engines hold."""
        return sum(
            self.models[name].asleep_bytes
            if engine.stage is Stage.ASLEEP or engine.evicted_asleep
            else self.known[name]
            for name, engine in self.engines.items()
        )

    def used_host_bytes(self) -> int:
        """Host memory that the engines hold."""
        return sum(
            self.models[name].process_bytes + (self.models[name].host_bytes if engine.copied else 0)
            for name, engine in self.engines.items()
        )

    def check_books(self) -> None:
        """What the policy believes is what is. While reports are on their way it cannot be."""
        if self._reports:
            return
        for name in self.models:
            engine = self.engines.get(name)
            assert self.policy.stage(name) is (engine.stage if engine else Stage.STOPPED), f"{name}: another stage"
        assert self.policy.used_bytes() == self.used_bytes(), "accelerator memory is not accounted for as it is"
        assert self.policy.used_host_bytes() == self.used_host_bytes(), "host memory is not accounted for as it is"


# For examples

LIMITS = Limits(memory_bytes=10, min_residency_s=20, ageing_s=60, backoff_s=10)


def model(name: str, memory: int = 10, priority: int = 0, idle_unload_s: float = 600) -> LazyModel:
    """A model that is loaded or stopped."""
    return LazyModel(name, memory, priority, idle_unload_s)


def sleeper(name: str, memory: int = 10, host: int = 4, **more: float) -> LazyModel:
    """A model that can sleep, and then takes one byte of the accelerator."""
    facts = {"priority": 0, "idle_unload_s": 600, "asleep_bytes": 1, "process_bytes": 1, **more}
    return LazyModel(name, memory, host_bytes=host, sleeps=True, **facts)  # type: ignore[arg-type]


def world(*models: LazyModel, at: float = 0.0, **limits: float) -> World:
    """A replica with room for ten bytes; `host_bytes` among the `limits` lets models sleep."""
    return World(list(models) or [model("a"), model("b")], dataclasses.replace(LIMITS, **limits), at=at)


def awake(where: World, *names: str) -> World:
    for name in names:
        where.want(name)
    where.run(where.times.load_s + TICK_S)
    assert all(where.stage(name) is Stage.AWAKE for name in names)
    return where


def asleep(where: World, *names: str) -> World:
    for name in names:
        awake(where, name)
        where.order(name, Order.SLEEP)
        where.run(where.times.sleep_s + TICK_S)
        assert where.stage(name) is Stage.ASLEEP
    return where


# For properties

NAMES = "abcd"
_HAPPENS = {
    "want": 8,
    "begin": 7,
    "begin unseen": 2,
    "finish": 8,
    "leave": 2,
    "die": 1,
    "fail": 1,
    "hang": 1,
    "heal": 2,
    "order": 2,
    "run": 14,
}
_ORDERS = [Order.LOAD, Order.LOAD, Order.SLEEP, Order.SLEEP, Order.UNLOAD, Order.PIN, Order.UNPIN, Order.UNPIN]
_MISHAPS = [Stage.LOADING, Stage.LOADING, Stage.WAKING, Stage.FALLING_ASLEEP, Stage.UNLOADING]


def random_world(rng: random.Random) -> World:
    """Four models of any kind in a pool with room for some of them."""
    models = [
        LazyModel(
            name,
            memory_bytes=(memory := rng.randint(1, 11)),
            priority=rng.randint(0, 1),
            idle_unload_s=rng.choice([1, 10, 60, 600]),
            sleeps=rng.random() < 0.6,
            asleep_bytes=min(memory - 1, rng.randint(0, 1)),
            host_bytes=rng.randint(0, 6),
            process_bytes=rng.randint(0, 3),
            idle_sleep_s=rng.choice([None, None, 1, 10]),
            load_s=rng.choice([1, 30]),
            wake_s=rng.choice([0.5, 2]),
        )
        for name in NAMES
    ]
    limits = Limits(
        memory_bytes=10,
        min_residency_s=rng.choice([0, 5, 20]),
        ageing_s=rng.choice([0, 3, 15, 60]),
        backoff_s=rng.choice([1, 10]),
        host_bytes=rng.choice([0, 6, 12]),
        grace_s=rng.choice([0, 3]),
        evicts=rng.random() < 0.9,
    )
    times = Times(load_s=rng.choice([0.25, 1, 5]), hang_s=rng.choice([2, 15]))
    w = World(models, limits, times, at=rng.choice([0.0, 1000.0]))
    for one in models:
        if rng.random() < 0.15:
            w.sizes[one.id] = max(1, one.memory_bytes + rng.randint(-1, 2))
    return w


def live(w: World, rng: random.Random, steps: int) -> None:
    """Let so many random things happen."""
    names = list(NAMES)
    for what in rng.choices(list(_HAPPENS), list(_HAPPENS.values()), k=steps):
        name = rng.choice(names)
        match what:
            case "want":
                w.want(name)
            case "begin":
                w.begin(name)
            case "begin unseen":
                w.begin(name, seen=False)
            case "finish":
                w.finish(name)
            case "leave":
                w.leave(name)
            case "die":
                w.die(name)
            case "fail":
                w.fails.add((name, rng.choice(_MISHAPS[:-1])))
            case "hang":
                w.hangs.add((name, rng.choice(_MISHAPS)))
            case "heal":
                w.heal()
            case "order":
                w.order(name, rng.choice(_ORDERS))
            case "run":
                seconds = rng.choice([0.25, 0.25, 0.5, 1, 3, 10, 40])
                w.run(seconds, step=max(TICK_S, seconds / 10))
        w.check_books()
