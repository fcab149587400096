"""Carries out what the policy decides: one task owns the state, loads and unloads run beside it.

Everything that happens becomes an event in one queue; nothing is locked and nothing is awaited while the
state changes. Each step has a deadline and a next one: an engine that does not fall asleep is stopped, one that
does not wake or stop is killed, and one that cannot be killed makes the replica unhealthy, so that Serve
replaces it. An unload is done when the engine's processes are gone and its memory with them.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Mapping

from serve_app.engines.base import Engine, EngineError, Phase, StuckError
from serve_app.residency import events
from serve_app.residency.demand import PoolDemand
from serve_app.residency.events import LazyModel, Limits, Order, Stage, Transition
from serve_app.residency.policy import Residency
from serve_app.residency.status import ModelStatus
from serve_app.residency.transitions import Transitions

logger = logging.getLogger(__name__)

_TICK_S = 0.25
# The loop has nothing in it that may block; silent for this long means that it is stuck.
_STUCK_S = 5.0
_STOP_GRACE_S = 5.0
_DRAIN_LIMIT_S = 3600.0
_RETRY_AFTER_S = 2.0
# Some milliseconds, unless a driver hangs.
_MEASURE_S = 10.0
_STEERED = (Stage.UNLOADING, Stage.FALLING_ASLEEP, Stage.WAKING)


class Refused(Exception):
    """The model cannot be had now. `code` is a word for machines, the message is for people."""

    def __init__(self, code: str, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.code, self.reason, self.retry_after_s = code, reason, retry_after_s


class ResidencyManager:
    """The lazy models of one replica. `new_engine` makes a stopped engine for a model."""

    def __init__(
        self,
        models: Mapping[str, LazyModel],
        limits: Limits,
        new_engine: Callable[[str], Engine],
        *,
        sleep_levels: Mapping[str, int] | None = None,
        went: Callable[[Transition], None] = lambda transition: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = Residency(models.values(), limits)
        self._new_engine = new_engine
        self._clock = clock
        self._transitions = Transitions(went, clock)
        self._models = dict(models)
        self._sleep_levels = dict(sleep_levels or {})
        self._began: dict[str, float] = {}
        self._loads: Counter[str] = Counter()
        self._wakes: Counter[str] = Counter()
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._engines: dict[str, Engine] = {}
        self._waiters: defaultdict[str, set[asyncio.Future[Engine]]] = defaultdict(set)
        self._events: asyncio.Queue[events.Event] = asyncio.Queue()
        self._effects: set[asyncio.Task[None]] = set()
        self._last_turn = clock()
        self._loop_task: asyncio.Task[None] | None = None
        self._stuck_engine: str | None = None
        self._closing = False
        self._reported: dict[str, tuple[int, int]] = {}
        # What an engine had served when it last came up; the policy counts from there.
        self._served_before: Counter[str] = Counter()

    def start(self) -> None:
        """Begin to work, in the running event loop."""
        self._loop_task = asyncio.create_task(self._run(), name="residency")

    async def close(self, drain_s: float) -> None:
        """Refuse who waits, let what is in flight finish, at most `drain_s`, and end every engine."""
        self._closing = True
        if self._loop_task:
            self._loop_task.cancel()
        for effect in self._effects:
            effect.cancel()
        for model in list(self._waiters):
            for waiter in self._take_waiters(model):
                waiter.set_exception(_closing())
        engines = list(self._engines.values())
        # One that still loads would answer only when it is done.
        await asyncio.gather(*(engine.drain(drain_s) for engine in engines if engine.phase is Phase.READY))
        await asyncio.gather(*(engine.stop(_STOP_GRACE_S) for engine in engines), return_exceptions=True)

    async def acquire(self, model: str) -> Engine:
        """Wait until the model is awake; loads it if need be. Raises `Refused`."""
        if self._closing:
            raise _closing()
        self._check_known(model)
        waiter: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
        self._waiters[model].add(waiter)
        self._events.put_nowait(events.Wanted(model))
        try:
            return await waiter
        finally:
            if waiter.cancelled():
                self._waiters[model].discard(waiter)
                self._events.put_nowait(events.Unwanted(model))

    def order(self, model: str, order: Order) -> None:
        """Have an operator's order carried out, as far as it goes. Raises `Refused` where the model cannot be had."""
        if self._closing:
            raise _closing()
        self._check_known(model)
        if order in (Order.LOAD, Order.PIN) and (refusal := self._policy.refusal(model, self._clock())):
            raise Refused(refusal.code, refusal.reason, refusal.retry_after_s)
        self._events.put_nowait(events.Ordered(model, order))

    def replace(self, model: str) -> None:
        """What its engine is made from has changed: the next one is made anew, and one that is there goes."""
        self._events.put_nowait(events.Replaced(model))

    def _check_known(self, model: str) -> None:
        if model not in self._models:
            # A Router of another version of the configuration; it must not end the loop.
            raise Refused("unknown_model", "this pool does not have it", _RETRY_AFTER_S)

    def knows(self, model: str) -> bool:
        """Whether the model is configured."""
        return model in self._models

    def configure(self, model: LazyModel, sleep_level: int) -> None:
        """Take in a new model, or new settings of a known one."""
        self._models[model.id] = model
        self._sleep_levels[model.id] = sleep_level
        self._policy.configure(model)

    def forget(self, model: str) -> bool:
        """Forget a model that is no longer configured. False: not yet; it is sent away when its requests are done."""
        if self._policy.stage(model) is not Stage.STOPPED or self._waiters.get(model):
            self._events.put_nowait(events.Ordered(model, Order.UNLOAD))
            return False
        if not self._policy.forget(model):
            return False
        del self._models[model]
        return True

    def moving(self) -> bool:
        """Whether the load path moves: the loop turns and no engine resists being ended."""
        return self._clock() - self._last_turn < _STUCK_S and self._stuck_engine is None

    def problem(self) -> str | None:
        """Why this replica must be replaced, if it must."""
        if self._stuck_engine is not None:
            return f"the engine of {self._stuck_engine} could not be ended"
        if not self.moving():
            return "the residency loop is stuck"
        return None

    def used_bytes(self) -> int:
        """Memory of all models that are not stopped."""
        return self._policy.used_bytes()

    def used_host_bytes(self) -> int:
        """Host memory of all models that are not stopped, as far as it is counted."""
        return self._policy.used_host_bytes()

    def status(self) -> dict[str, ModelStatus]:
        """Every model that is more than configured: it is up, was up, or is waited for."""
        now = self._clock()
        places = {model: place for place, model in enumerate(self._policy.places(now), start=1)}
        interesting = (
            model
            for model in self._models
            if self._loads[model] or model in places or self._policy.stage(model) is not Stage.STOPPED
        )
        return {model: self._status(model, places.get(model, 0), now) for model in interesting}

    def _status(self, model: str, place: int, now: float) -> ModelStatus:
        stage = self._policy.stage(model)
        failure = self._policy.failure(model)
        expected = self._policy.expected_s(model)
        engine = self._engines.get(model)
        progress = 0.0
        if stage in (Stage.LOADING, Stage.WAKING):
            progress = min(0.99, (now - self._began.get(model, now)) / max(expected, 0.001))
        return ModelStatus(
            state=self._state(model),
            progress=round(progress, 2),
            in_flight=engine.in_flight if engine else 0,
            kv_cache=engine.reported.kv_cache if engine else 0.0,
            waiting=engine.reported.waiting if engine else 0,
            expected_load_s=round(self._policy.load_s(model), 1),
            expected_wake_s=round(expected * (1 - progress), 1),
            loads=self._loads[model],
            wakes=self._wakes[model],
            failure=failure,
            place=place,
            memory_bytes=self._policy.memory_bytes(model),
            pinned=self._policy.pinned(model),
            phases=dict(engine.phase_seconds) if engine else {},
        )

    def demand(self) -> PoolDemand:
        """What the autoscaling policy is told."""
        return self._policy.demand(held={model: len(waiters) for model, waiters in self._waiters.items() if waiters})

    async def _run(self) -> None:
        while True:
            self._last_turn = self._clock()
            try:
                event = await asyncio.wait_for(self._events.get(), _TICK_S)
            except TimeoutError:
                event = events.Tick()
            self._take(event)
            for model in self._policy.lost_pins(self._clock()):
                self._take(events.Ordered(model, Order.LOAD))
            match event:
                case events.Died(model) if self._policy.stage(model) not in _STEERED:
                    self._engines.pop(model, None)
                case events.StillBusy(model):
                    # What was reported during the unload was not heard.
                    self._reported.pop(model, None)
            for model, engine in self._engines.items():
                activity = (engine.in_flight, engine.served)
                if activity != self._reported.get(model):
                    self._reported[model] = activity
                    self._take(events.Activity(model, engine.in_flight, self._arrived(model, engine)))

    def _arrived(self, model: str, engine: Engine) -> int:
        """Requests since the engine came up."""
        return engine.in_flight + engine.served - self._served_before[model]

    def _take(self, event: events.Event) -> None:
        if not isinstance(event, events.Tick) and event.model not in self._models:
            return  # it was forgotten meanwhile
        actions = self._policy.handle(event, self._clock())
        # An event and its actions name every model that they change.
        if not isinstance(event, events.Tick):
            self._transitions.note(event.model, self._state(event.model))
        for action in actions:
            self._transitions.note(action.model, self._state(action.model))
            self._carry_out(action)

    def _state(self, model: str) -> str:
        stage = self._policy.stage(model)
        return "failed" if stage is Stage.STOPPED and self._policy.failure(model) else stage.value

    def _carry_out(self, action: events.Action) -> None:
        match action:
            case events.Load(model):
                self._loading[model] = self._spawn(self._load(model))
                self._loading[model].add_done_callback(functools.partial(self._never_begun, model))
            case events.Abandon(model):
                if loading := self._loading.get(model):
                    loading.cancel()
                elif model in self._engines:
                    self._spawn(self._unload(model, drain=True))  # it has come up just now
                else:
                    self._events.put_nowait(events.Unloaded(model))  # it has failed just now
            case events.Sleep(model, drain):
                self._spawn(self._sleep(model, drain))
            case events.Wake(model):
                self._spawn(self._wake(model))
            case events.Unload(model, drain):
                self._spawn(self._unload(model, drain))
            case events.Grant(model):
                for waiter in self._take_waiters(model):
                    waiter.set_result(self._engines[model])
            case events.Refuse(model, code, reason, retry_after_s):
                for waiter in self._take_waiters(model):
                    waiter.set_exception(Refused(code, reason, retry_after_s))

    def _take_waiters(self, model: str) -> list[asyncio.Future[Engine]]:
        return [waiter for waiter in self._waiters.pop(model, ()) if not waiter.done()]

    def _spawn(self, effect: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(effect)
        self._effects.add(task)
        task.add_done_callback(self._effects.discard)
        return task

    def _never_begun(self, model: str, loading: asyncio.Task[None]) -> None:
        """A load that was given up before its first step has run nothing, and reported nothing."""
        if loading.cancelled() and not self._closing:
            self._loading.pop(model, None)
            self._events.put_nowait(events.Unloaded(model))

    async def _load(self, model: str) -> None:
        began = self._began[model] = self._clock()
        self._loads[model] += 1
        logger.info("loading %s", model)
        try:
            engine = self._engines[model] = self._new_engine(model)
            await engine.start()
        except asyncio.CancelledError:
            # Nobody wants it any more, and its processes have ended: `start` sees to that.
            self._engines.pop(model, None)
            logger.info("gave up loading %s", model)
            self._events.put_nowait(events.Unloaded(model))
            return
        except StuckError:
            logger.exception("%s could not be ended", model)
            self._stuck_engine = model  # it keeps its memory until the replica is replaced
            return
        except Exception as error:
            self._engines.pop(model, None)
            self._events.put_nowait(events.LoadFailed(model, _log_failure(f"loading {model} failed", error)))
            return
        finally:
            self._loading.pop(model, None)
        seconds = self._clock() - began
        self._served_before[model] = 0
        self._reported[model] = (0, 0)
        memory = await measured(engine)
        if self._engines.get(model) is not engine:
            return  # given up and ended meanwhile; the next load may be under way
        logger.info("%s is awake after %.1f s, with %.2f GB", model, seconds, memory / 1e9)
        if memory > (promised := self._models[model].memory_bytes):
            logger.warning(
                "%s takes %.2f GB, its memory_gb says %.2f: raise it, or others lose their room to it",
                model,
                memory / 1e9,
                promised / 1e9,
            )
        self._events.put_nowait(events.Loaded(model, seconds, memory))
        self._spawn(self._mourn(model, engine))

    async def _mourn(self, model: str, engine: Engine) -> None:
        """Report an engine that ends without having been told to."""
        reason = await engine.wait_exit()
        # What steers an engine reports its end itself, unless it found a request and gave up just before.
        while self._engines.get(model) is engine and self._policy.stage(model) in _STEERED:  # noqa: ASYNC110 # short
            await asyncio.sleep(_TICK_S)
        if self._engines.get(model) is engine:
            logger.error("%s has died: %s", model, reason)
            # It is kept until the policy knows: what is decided meanwhile still finds it.
            self._events.put_nowait(events.Died(model, reason))

    async def _sleep(self, model: str, drain: bool) -> None:
        engine = self._engines[model]
        if not await self._closed(model, engine, drain):
            return
        logger.info("putting %s to sleep", model)
        try:
            await engine.sleep(self._sleep_levels.get(model, 1))
        except Exception as error:
            _log_failure(f"{model} did not fall asleep", error)
            self._events.put_nowait(events.SleepFailed(model))
            return
        self._events.put_nowait(events.Slept(model))

    async def _wake(self, model: str) -> None:
        engine = self._engines[model]
        began = self._began[model] = self._clock()
        self._wakes[model] += 1
        logger.info("waking %s", model)
        try:
            await engine.wake()
        except Exception as error:
            reason = _log_failure(f"{model} did not wake", error)
            if await self._end(model, engine):
                self._events.put_nowait(events.WakeFailed(model, reason))
            return
        seconds = self._clock() - began
        self._served_before[model] = engine.served
        self._reported[model] = (0, engine.served)
        logger.info("%s is awake after %.1f s", model, seconds)
        self._events.put_nowait(events.Woken(model, seconds))

    async def _unload(self, model: str, drain: bool) -> None:
        engine = self._engines[model]
        # One that sleeps, or could not be put to sleep, has let nobody in since.
        if engine.phase is Phase.READY and not await self._closed(model, engine, drain):
            return
        logger.info("unloading %s", model)
        if await self._end(model, engine):
            self._events.put_nowait(events.Unloaded(model))

    async def _closed(self, model: str, engine: Engine, drain: bool) -> bool:
        """Have the engine take no more requests. False: it is in use, and goes on."""
        if drain:
            await engine.drain(_DRAIN_LIMIT_S)
        elif not await engine.close_if_idle() and engine.phase is not Phase.STOPPED:
            self._events.put_nowait(events.StillBusy(model, self._arrived(model, engine)))
            return False
        return True

    async def _end(self, model: str, engine: Engine) -> bool:
        """End the engine and all its memory. False: it cannot be ended, and this replica must go."""
        try:
            await engine.stop(_STOP_GRACE_S)
        except Exception:
            logger.exception("%s could not be ended", model)
            self._stuck_engine = model
            return False
        self._engines.pop(model, None)
        return True


async def measured(engine: Engine) -> int:
    """What the engine takes, in bytes; 0 where that cannot be found out: it answers all the same."""
    try:
        return await asyncio.wait_for(asyncio.to_thread(engine.memory_bytes), _MEASURE_S)
    except Exception as error:
        logger.warning("the memory of an engine could not be measured: %s: %s", type(error).__name__, error)
        return 0


def _closing() -> Refused:
    return Refused("closing", "its replica is shutting down", _RETRY_AFTER_S)


def _log_failure(what: str, error: Exception) -> str:
    """Log what an engine failed at; returns the reason. One that nobody foresaw is logged with its traceback."""
    if isinstance(error, EngineError):
        logger.error("%s", error)
        return str(error)
    logger.error("%s", what, exc_info=error)
    return f"{type(error).__name__}: {error}"
