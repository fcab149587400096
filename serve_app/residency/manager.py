"""Carries out what the policy decides: one task owns the state, loads and unloads run beside it.

Everything that happens becomes an event in one queue; nothing is locked and nothing is awaited while the
state changes. An unload is done when the engine's processes are gone; one that cannot be ended makes the
replica unhealthy, so that Serve replaces it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Mapping

from serve_app.engines.base import Engine, EngineError, Phase
from serve_app.residency import policy
from serve_app.residency.demand import PoolDemand
from serve_app.residency.policy import LazyModel, Limits, Residency, Stage

logger = logging.getLogger(__name__)

_TICK_S = 0.25
# The loop has nothing in it that may block; silent for this long means that it is stuck.
_STUCK_S = 5.0
_STOP_GRACE_S = 5.0
_DRAIN_LIMIT_S = 3600.0
_RETRY_AFTER_S = 2.0


class Refused(Exception):
    """The model cannot be had now. `code` is a word for machines, the message is for people."""

    def __init__(self, code: str, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.code, self.reason, self.retry_after_s = code, reason, retry_after_s


@dataclasses.dataclass(frozen=True, slots=True)
class ModelStatus:
    """What is published about one model. Times in seconds; `progress` from 0 to 1 while it loads.

    `loads` counts the loads that were begun since the replica started.
    """

    state: str
    progress: float
    in_flight: int
    expected_load_s: float
    loads: int
    failure: str


class ResidencyManager:
    """The lazy models of one replica. `new_engine` makes a stopped engine for a model."""

    def __init__(
        self,
        models: Mapping[str, LazyModel],
        limits: Limits,
        new_engine: Callable[[str], Engine],
        expected_load_s: Mapping[str, float],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = Residency(models.values(), limits)
        self._new_engine = new_engine
        self._clock = clock
        self._expected_load_s = dict(expected_load_s)
        self._load_began: dict[str, float] = {}
        self._loads: Counter[str] = Counter()
        self._engines: dict[str, Engine] = {}
        self._waiters: defaultdict[str, set[asyncio.Future[Engine]]] = defaultdict(set)
        self._events: asyncio.Queue[policy.Event] = asyncio.Queue()
        self._effects: set[asyncio.Task[None]] = set()
        self._last_turn = clock()
        self._loop_task: asyncio.Task[None] | None = None
        self._stuck_engine: str | None = None
        self._closing = False
        self._reported: dict[str, tuple[int, int]] = {}

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
        if model not in self._expected_load_s:
            # A Router of another version of the configuration; it must not end the loop.
            raise Refused("unknown_model", "this pool does not have it", _RETRY_AFTER_S)
        waiter: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
        self._waiters[model].add(waiter)
        self._events.put_nowait(policy.Wanted(model))
        try:
            return await waiter
        finally:
            if waiter.cancelled():
                self._waiters[model].discard(waiter)
                self._events.put_nowait(policy.Unwanted(model))

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

    def status(self) -> dict[str, ModelStatus]:
        """Every model as it is now."""
        now = self._clock()
        found = {}
        for model in self._expected_load_s:
            stage = self._policy.stage(model)
            failure = self._policy.failure(model)
            expected = self._expected_load_s[model]
            engine = self._engines.get(model)
            progress = 0.0
            if stage is Stage.LOADING:
                progress = min(0.99, (now - self._load_began.get(model, now)) / max(expected, 0.001))
            found[model] = ModelStatus(
                state="failed" if failure and stage is Stage.STOPPED else stage.value,
                progress=round(progress, 2),
                in_flight=engine.in_flight if engine else 0,
                expected_load_s=round(expected, 1),
                loads=self._loads[model],
                failure=failure,
            )
        return found

    def demand(self) -> PoolDemand:
        """What the autoscaling policy is told."""
        return self._policy.demand(held={model: len(waiters) for model, waiters in self._waiters.items() if waiters})

    async def _run(self) -> None:
        while True:
            self._last_turn = self._clock()
            try:
                event = await asyncio.wait_for(self._events.get(), _TICK_S)
            except TimeoutError:
                event = policy.Tick()
            self._take(event)
            match event:
                case policy.Died(model) if self._policy.stage(model) is not Stage.UNLOADING:
                    self._engines.pop(model, None)
                case policy.StillBusy(model):
                    # What was reported during the unload was not heard.
                    self._reported.pop(model, None)
            for model, engine in self._engines.items():
                activity = (engine.in_flight, engine.served)
                if activity != self._reported.get(model):
                    self._reported[model] = activity
                    self._take(policy.Activity(model, engine.in_flight, engine.in_flight + engine.served))

    def _take(self, event: policy.Event) -> None:
        for action in self._policy.handle(event, self._clock()):
            self._carry_out(action)

    def _carry_out(self, action: policy.Action) -> None:
        match action:
            case policy.Load(model):
                self._spawn(self._load(model))
            case policy.Unload(model, drain):
                self._spawn(self._unload(model, drain))
            case policy.Grant(model):
                for waiter in self._take_waiters(model):
                    waiter.set_result(self._engines[model])
            case policy.Refuse(model, code, reason, retry_after_s):
                for waiter in self._take_waiters(model):
                    waiter.set_exception(Refused(code, reason, retry_after_s))

    def _take_waiters(self, model: str) -> list[asyncio.Future[Engine]]:
        return [waiter for waiter in self._waiters.pop(model, ()) if not waiter.done()]

    def _spawn(self, effect: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(effect)
        self._effects.add(task)
        task.add_done_callback(self._effects.discard)

    async def _load(self, model: str) -> None:
        began = self._load_began[model] = self._clock()
        self._loads[model] += 1
        logger.info("loading %s", model)
        try:
            engine = self._engines[model] = self._new_engine(model)
            await engine.start()
        except EngineError as error:
            self._engines.pop(model, None)
            logger.error("%s", error)
            self._events.put_nowait(policy.LoadFailed(model, str(error)))
            return
        except Exception as error:
            self._engines.pop(model, None)
            logger.exception("loading %s failed", model)
            self._events.put_nowait(policy.LoadFailed(model, f"{type(error).__name__}: {error}"))
            return
        self._expected_load_s[model] = self._clock() - began
        self._reported[model] = (0, 0)
        self._events.put_nowait(policy.Loaded(model))
        self._spawn(self._mourn(model, engine))

    async def _mourn(self, model: str, engine: Engine) -> None:
        """Report an engine that ends without having been told to."""
        reason = await engine.wait_exit()
        # An unload reports the end itself, unless it found a request and gave up just before.
        while self._engines.get(model) is engine and self._policy.stage(model) is Stage.UNLOADING:  # noqa: ASYNC110 # rare, and short
            await asyncio.sleep(_TICK_S)
        if self._engines.get(model) is engine:
            logger.error("%s has died: %s", model, reason)
            # It is kept until the policy knows: what is decided meanwhile still finds it.
            self._events.put_nowait(policy.Died(model, reason))

    async def _unload(self, model: str, drain: bool) -> None:
        engine = self._engines[model]
        if drain:
            await engine.drain(_DRAIN_LIMIT_S)
        elif not await engine.close_if_idle() and engine.phase is not Phase.STOPPED:
            self._events.put_nowait(policy.StillBusy(model))
            return
        logger.info("unloading %s", model)
        try:
            await engine.stop(_STOP_GRACE_S)
        except Exception:
            logger.exception("%s could not be unloaded", model)
            self._stuck_engine = model
            return
        del self._engines[model]
        self._events.put_nowait(policy.Unloaded(model))


def _closing() -> Refused:
    return Refused("closing", "its replica is shutting down", _RETRY_AFTER_S)
