"""A residency manager of two models that do not fit together, over engines that do what a test tells them to."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from scripted_engine import ScriptedEngine

from serve_app.residency import manager as manager_module
from serve_app.residency.events import LazyModel, Limits, Order
from serve_app.residency.manager import Refused, ResidencyManager
from serve_app.residency.victims import LEASE_S

PATIENCE_S = 5.0


class Pool:
    """A manager of two models that do not fit together; its engines as they were made, and its clock.

    With `host_bytes` they can sleep.
    """

    def __init__(self, host_bytes: int = 0) -> None:
        self.now = 1000.0
        self.transitions: list[tuple[str, str, str]] = []
        self.engines: list[ScriptedEngine] = []
        self.loads_at_once = True
        self.failures: list[Exception] = []
        self.broken_factory: Exception | None = None
        asleep = {"sleeps": True, "host_bytes": 10, "process_bytes": 1, "wake_s": 4} if host_bytes else {}
        models = {name: LazyModel(name, 10, 0, idle_unload_s=60, load_s=20, **asleep) for name in ("a", "b")}
        models["huge"] = LazyModel("huge", 11, 0, idle_unload_s=60)
        self.manager = ResidencyManager(
            models,
            Limits(memory_bytes=10, min_residency_s=0, ageing_s=60, backoff_s=10, host_bytes=host_bytes),
            self.new_engine,
            sleep_levels={"b": 2},
            went=lambda went: self.transitions.append((went.model, went.was, went.now)),
            clock=lambda: self.now,
        )

    def new_engine(self, model: str) -> ScriptedEngine:
        if self.broken_factory:
            raise self.broken_factory
        engine = ScriptedEngine(model)
        engine.failure = self.failures.pop(0) if self.failures else None
        if self.loads_at_once:
            engine.load.set()
        self.engines.append(engine)
        return engine

    async def acquired(self, model: str) -> ScriptedEngine:
        async with asyncio.timeout(PATIENCE_S):
            engine = await self.manager.acquire(model)
        assert isinstance(engine, ScriptedEngine)
        return engine

    async def refusal(self, model: str) -> Refused:
        with pytest.raises(Refused) as refused:
            await self.acquired(model)
        return refused.value

    async def swapped_for(self, model: str) -> ScriptedEngine:
        """Acquire it where the other one, which is idle, has to make room."""
        self.now += LEASE_S + 1
        return await self.acquired(model)

    async def ordered(self, model: str, order: Order, state: str) -> None:
        """Give an order and wait for the state that it leads to."""
        self.manager.order(model, order)
        await self.until(lambda: self.state(model) == state)

    async def queued(self, model: str) -> None:
        """Wait until the model waits for room: what is there was looked at, and did not go."""
        await self.until(lambda: self.manager.status().get(model) and self.manager.status()[model].place)

    async def settled(self) -> None:
        """Wait until all that has happened so far was taken in."""
        await self.until(self.manager._events.empty)
        self.now += 0.001
        await self.until(lambda: self.manager._last_turn == self.now)

    def state(self, model: str) -> str:
        found = self.manager.status().get(model)
        return found.state if found else "stopped"

    async def until(self, condition: Callable[[], object]) -> None:
        """Let the loop turn until the condition holds."""
        async with asyncio.timeout(PATIENCE_S):
            # The turns of the manager's own loop are what is waited for.
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def working(pool: Pool) -> AsyncIterator[Pool]:
    pool.manager.start()
    with pytest.MonkeyPatch.context() as quick:
        quick.setattr(manager_module, "_TICK_S", 0.001)
        yield pool
        for engine in pool.engines:
            engine.measured.set()
            engine.ended.set()
            engine.load.set()
            engine.idle.set()
        async with asyncio.timeout(PATIENCE_S):
            await pool.manager.close(0)


async def waiting(pool: Pool, model: str, count: int = 1) -> list[asyncio.Task[ScriptedEngine]]:
    """Acquires that wait for a load which does not end by itself."""
    pool.loads_at_once = False
    tasks = [asyncio.create_task(pool.acquired(model)) for _ in range(count)]
    await pool.until(lambda: pool.state(model) == "loading" and pool.engines)
    return tasks


async def left(pool: Pool, task: asyncio.Task[ScriptedEngine], model: str) -> None:
    """The only client of the model leaves."""
    task.cancel()
    await asyncio.wait([task])
    await pool.until(lambda: not pool.manager._policy._slots[model].waiting)
