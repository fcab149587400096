"""serve_app.residency.manager: what waits is answered, whatever engines, clients and the clock do."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from scripted_engine import ScriptedEngine, failed

from serve_app.engines.base import EngineError, Phase, StuckError
from serve_app.residency import manager as manager_module
from serve_app.residency.demand import PoolDemand
from serve_app.residency.events import LazyModel, Limits, Order
from serve_app.residency.manager import Refused, ResidencyManager
from serve_app.residency.policy import LEASE_S

PATIENCE_S = 5.0


class Pool:
    """A manager of two models that do not fit together; its engines as they were made, and its clock.

    With `host_bytes` they can sleep.
    """

    def __init__(self, host_bytes: int = 0) -> None:
        self.now = 1000.0
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
    yield pool
    for engine in pool.engines:
        engine.measured.set()
        engine.ended.set()
        engine.load.set()
        engine.idle.set()
    async with asyncio.timeout(PATIENCE_S):
        await pool.manager.close(0)


@pytest.fixture(autouse=True)
def quick_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "_TICK_S", 0.001)


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    async with working(Pool()) as pool:
        yield pool


@pytest.fixture
async def dorm() -> AsyncIterator[Pool]:
    """A pool whose models sleep."""
    async with working(Pool(host_bytes=100)) as pool:
        yield pool


async def waiting(pool: Pool, model: str, count: int = 1) -> list[asyncio.Task[ScriptedEngine]]:
    """Acquires that wait for a load which does not end by itself."""
    pool.loads_at_once = False
    tasks = [asyncio.create_task(pool.acquired(model)) for _ in range(count)]
    await pool.until(lambda: pool.state(model) == "loading" and pool.engines)
    return tasks


@pytest.mark.case(11)
async def test_twenty_acquires_at_once_cause_one_load_and_get_the_same_engine(pool: Pool) -> None:
    tasks = await waiting(pool, "a", 20)
    pool.engines[0].load.set()
    assert {id(await task) for task in tasks} == {id(pool.engines[0])}
    assert (len(pool.engines), pool.manager.status()["a"].loads) == (1, 1)


async def test_awake_model_is_given_at_once(pool: Pool) -> None:
    assert await pool.acquired("a") is await pool.acquired("a")
    assert pool.state("a") == "awake"


async def test_progress_follows_the_clock_and_the_measured_time_is_remembered(pool: Pool) -> None:
    (task,) = await waiting(pool, "a")
    pool.now += 5
    assert pool.manager.status()["a"].progress == 0.25
    pool.engines[0].load.set()
    await task
    assert pool.manager.status()["a"].expected_load_s == 5


async def test_failed_load_refuses_all_who_wait_then_backs_off_and_then_loads_again(pool: Pool) -> None:
    pool.failures.append(failed("no weights"))
    tasks = await waiting(pool, "a", 3)
    pool.engines[0].load.set()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, Refused)
        assert (result.code, result.reason, result.retry_after_s) == ("load_failed", "no weights", 10)
    assert (pool.state("a"), pool.manager.status()["a"].failure) == ("failed", "no weights")
    assert (await pool.refusal("a")).code == "load_failed"
    assert len(pool.engines) == 1
    pool.now += 10
    pool.loads_at_once = True
    assert await pool.acquired("a") is pool.engines[1]


@pytest.mark.parametrize("error", [RuntimeError("odd"), OSError("no room"), TimeoutError()])
async def test_load_that_fails_in_an_unforeseen_way_is_refused_too(pool: Pool, error: Exception) -> None:
    pool.failures.append(error)
    assert (await pool.refusal("a")).code == "load_failed"
    assert pool.manager.problem() is None


async def test_engine_that_cannot_even_be_made_is_a_failed_load(pool: Pool) -> None:
    pool.broken_factory = OSError("too many open files")
    assert (await pool.refusal("a")).code == "load_failed"
    assert pool.state("a") == "failed"


async def test_model_that_never_fits_is_refused_at_once(pool: Pool) -> None:
    assert (await pool.refusal("huge")).code == "never_fits"


async def test_unknown_model_is_refused_and_harms_nobody(pool: Pool) -> None:
    await pool.refusal("nobody-knows-it")
    assert await pool.acquired("a")


async def test_waiter_that_leaves_does_not_end_the_load_for_the_others(pool: Pool) -> None:
    leaver, stayer = await waiting(pool, "a", 2)
    leaver.cancel()
    await asyncio.wait([leaver])
    pool.engines[0].load.set()
    assert await stayer is pool.engines[0]


@pytest.mark.case(23)
async def test_load_outlives_its_only_client_and_is_unloaded_when_idle(pool: Pool) -> None:
    (leaver,) = await waiting(pool, "a")
    leaver.cancel()
    await asyncio.wait([leaver])
    pool.engines[0].load.set()
    await pool.until(lambda: pool.state("a") == "awake")
    pool.now += 61
    await pool.until(lambda: pool.state("a") == "stopped")
    assert pool.engines[0].gone.is_set()


async def test_idle_model_is_unloaded_and_loaded_again_on_demand(pool: Pool) -> None:
    first = await pool.acquired("a")
    pool.now += 61
    await pool.until(lambda: pool.state("a") == "stopped")
    assert (first.closed, first.stops) == (True, 1)
    assert await pool.acquired("a") is not first


async def test_model_in_use_is_not_unloaded_until_its_request_has_ended(pool: Pool) -> None:
    engine = await pool.acquired("a")
    engine.begin()
    await pool.until(lambda: pool.manager.status()["a"].in_flight == 1)
    other = asyncio.create_task(pool.acquired("b"))
    await pool.until(lambda: pool.manager._policy._slots["b"].waiting)
    pool.now += LEASE_S + 1
    for _ in range(100):
        await asyncio.sleep(0)
    assert not engine.closed
    engine.finish()
    assert (await other).spec.model_id == "b"
    assert engine.stops == 1


async def test_model_that_waited_long_gets_its_room_when_the_busy_one_has_drained(pool: Pool) -> None:
    engine = await pool.acquired("a")
    engine.begin()
    await pool.until(lambda: pool.manager._policy._slots["a"].in_flight)
    other = asyncio.create_task(pool.acquired("b"))
    await pool.until(lambda: pool.manager._policy._slots["b"].waiting)
    pool.now += 61
    await asyncio.wait_for(engine.asked_to_close.wait(), PATIENCE_S)
    assert (engine.closed, engine.stops) == (True, 0)
    engine.finish()
    assert (await other).spec.model_id == "b"


async def test_request_that_ends_while_the_unload_looks_does_not_leave_the_model_in_use_for_ever(
    pool: Pool,
) -> None:
    engine = await pool.acquired("a")
    engine.busy_once = True
    pool.now += 61
    await pool.until(lambda: engine.asked_to_close.is_set() and pool.state("a") == "awake")
    pool.now += 61
    await pool.until(lambda: pool.state("a") == "stopped")


async def test_engine_that_dies_is_loaded_again_by_the_next_acquire(pool: Pool) -> None:
    first = await pool.acquired("a")
    first.begin()
    first.kill()
    await pool.until(lambda: pool.state("a") == "stopped")
    second = await pool.acquired("a")
    assert second is not first
    assert pool.manager.problem() is None


async def test_engine_that_dies_right_after_its_load_harms_nobody(pool: Pool) -> None:
    (task,) = await waiting(pool, "a")
    pool.loads_at_once = True
    engine = pool.engines[0]
    engine.gone.set()
    engine.load.set()
    await asyncio.wait([task])
    await pool.until(lambda: pool.state("a") == "stopped")
    assert await pool.acquired("a") is pool.engines[1]


async def test_engine_that_dies_at_the_moment_of_its_unload_is_unloaded(pool: Pool) -> None:
    engine = await pool.acquired("a")
    pool.now += LEASE_S + 1
    other = asyncio.create_task(pool.acquired("b"))
    engine.kill()
    assert (await other).spec.model_id == "b"
    assert pool.state("a") == "stopped"


async def test_engine_that_dies_while_it_drains_makes_room(pool: Pool) -> None:
    engine = await pool.acquired("a")
    engine.begin()
    other = asyncio.create_task(pool.acquired("b"))
    await pool.until(lambda: pool.manager._policy._slots["b"].waiting)
    pool.now += 61
    await asyncio.wait_for(engine.asked_to_close.wait(), PATIENCE_S)
    engine.kill()
    engine.idle.set()
    assert (await other).spec.model_id == "b"


async def test_engine_that_dies_right_after_it_refused_to_close_is_noticed(pool: Pool) -> None:
    engine = await pool.acquired("a")
    engine.busy_once = True
    pool.now += 61
    await asyncio.wait_for(engine.asked_to_close.wait(), PATIENCE_S)
    engine.kill()
    await pool.until(lambda: pool.state("a") == "stopped")
    assert await pool.acquired("a") is pool.engines[1]


async def test_engine_that_cannot_be_ended_is_a_problem_of_the_replica(pool: Pool) -> None:
    engine = await pool.acquired("a")
    engine.resists = True
    pool.now += 61
    await pool.until(lambda: pool.manager.problem() == "the engine of a could not be ended")
    assert not pool.manager.moving()
    engine.resists = False


async def test_loop_that_does_not_turn_is_a_problem_of_the_replica(pool: Pool) -> None:
    assert pool.manager.problem() is None
    pool.now += 60
    assert pool.manager.problem() == "the residency loop is stuck"
    await pool.until(lambda: pool.manager.problem() is None)


async def test_model_wanted_while_it_is_unloaded_is_loaded_when_that_is_done(pool: Pool) -> None:
    first = await pool.acquired("a")
    first.ended.clear()
    pool.now += 61
    await pool.until(lambda: first.stops)
    task = asyncio.create_task(pool.acquired("a"))
    await pool.until(lambda: pool.manager._policy._slots["a"].waiting)
    assert len(pool.engines) == 1
    first.ended.set()
    assert await task is pool.engines[1]


async def test_closing_waits_for_what_runs_and_ends_every_engine(pool: Pool) -> None:
    engine = await pool.acquired("a")
    engine.begin()
    closing = asyncio.create_task(pool.manager.close(PATIENCE_S))
    await asyncio.wait_for(engine.asked_to_close.wait(), PATIENCE_S)
    assert engine.stops == 0
    engine.finish()
    await closing
    assert engine.gone.is_set()


async def test_closing_during_a_load_ends_it_and_refuses_who_waits(pool: Pool) -> None:
    tasks = await waiting(pool, "a", 2)
    await asyncio.wait_for(pool.manager.close(PATIENCE_S), PATIENCE_S)
    for result in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S):
        assert isinstance(result, Refused)
    assert pool.engines[0].gone.is_set()


async def test_nothing_is_kept_for_requests_that_are_over(pool: Pool) -> None:
    await pool.acquired("a")
    for _ in range(200):
        await pool.acquired("a")
        task = asyncio.create_task(pool.acquired("b"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    await pool.until(lambda: pool.manager._policy._slots["b"].waiting == 0)
    assert not any(pool.manager._waiters.values())
    assert len(pool.manager._effects) <= 2


async def test_demand_names_what_is_awake_what_comes_and_what_finds_no_room(pool: Pool) -> None:
    assert pool.manager.demand() == PoolDemand(free_bytes=10)
    (task,) = await waiting(pool, "a")
    assert pool.manager.demand() == PoolDemand(held=1, coming=frozenset("a"))
    pool.engines[0].load.set()
    await task
    assert pool.manager.demand() == PoolDemand(awake=frozenset("a"))
    # Just granted, so it keeps its room for a while.
    other = asyncio.create_task(pool.acquired("b"))
    await pool.until(lambda: pool.manager.demand().held)
    assert pool.manager.demand() == PoolDemand(held=1, awake=frozenset("a"), unmet={"b": 10})
    other.cancel()
    await pool.until(lambda: not pool.manager.demand().held)
    assert pool.manager.demand() == PoolDemand(awake=frozenset("a"))


# Sleep


async def test_model_that_makes_room_falls_asleep_and_the_next_acquire_wakes_the_same_engine(dorm: Pool) -> None:
    first = await dorm.acquired("a")
    assert (await dorm.swapped_for("b")).spec.model_id == "b"
    assert (dorm.state("a"), first.stops, first.levels) == ("asleep", 0, [1])
    assert await dorm.swapped_for("a") is first
    assert (first.closed, first.wakes, len(dorm.engines)) == (False, 1, 2)
    status = dorm.manager.status()["a"]
    assert (status.state, status.loads, status.wakes) == ("awake", 1, 1)


async def test_each_model_sleeps_at_its_own_level(dorm: Pool) -> None:
    engine = await dorm.acquired("b")
    await dorm.ordered("b", Order.SLEEP, "asleep")
    assert engine.levels == [2]


@pytest.mark.case(127)
async def test_many_acquires_of_a_sleeping_model_wake_it_once(dorm: Pool) -> None:
    engine = await dorm.acquired("a")
    await dorm.ordered("a", Order.SLEEP, "asleep")
    engine.rises.clear()
    tasks = [asyncio.create_task(dorm.acquired("a")) for _ in range(20)]
    await dorm.until(lambda: engine.wakes)
    engine.rises.set()
    assert {id(await task) for task in tasks} == {id(engine)}
    assert engine.wakes == 1


async def test_model_wanted_while_it_falls_asleep_is_woken_when_it_sleeps(dorm: Pool) -> None:
    engine = await dorm.acquired("a")
    engine.nods_off.clear()
    await dorm.ordered("a", Order.SLEEP, "falling_asleep")
    task = asyncio.create_task(dorm.acquired("a"))
    await dorm.until(lambda: dorm.manager._waiters["a"])
    engine.nods_off.set()
    assert await task is engine


async def test_requests_of_before_the_sleep_do_not_end_the_lease_of_a_waiter(dorm: Pool) -> None:
    engine = await dorm.acquired("a")
    for _ in range(5):
        engine.begin()
        engine.finish()
    await dorm.until(lambda: dorm.manager._reported.get("a") == (0, 5))
    await dorm.ordered("a", Order.SLEEP, "asleep")
    await dorm.acquired("a")
    other = asyncio.create_task(dorm.acquired("b"))
    await dorm.queued("b")
    assert dorm.state("a") == "awake"
    engine.begin()
    engine.finish()
    assert (await other).spec.model_id == "b"
    assert dorm.state("a") == "asleep"


async def test_requests_of_before_a_refused_unload_do_not_end_the_lease_of_a_waiter(pool: Pool) -> None:
    engine = await pool.acquired("a")
    for _ in range(5):
        engine.begin()
        engine.finish()
    await pool.until(lambda: pool.manager._reported.get("a") == (0, 5))
    engine.looks.clear()
    engine.busy_once = True
    pool.now += 61
    await asyncio.wait_for(engine.asked_to_close.wait(), PATIENCE_S)
    task = asyncio.create_task(pool.acquired("a"))
    await pool.until(lambda: pool.manager._policy._slots["a"].waiting)
    engine.looks.set()
    assert await task is engine
    await pool.until(lambda: pool.manager._reported.get("a") == (0, 6))
    other = asyncio.create_task(pool.acquired("b"))
    await pool.queued("b")
    assert pool.state("a") == "awake"
    engine.begin()
    engine.finish()
    assert (await other).spec.model_id == "b"


@pytest.mark.parametrize("kind", [EngineError, RuntimeError])
async def test_engine_that_does_not_fall_asleep_is_stopped_and_its_model_loaded_anew(
    dorm: Pool, kind: type[Exception]
) -> None:
    engine = await dorm.acquired("a")
    engine.sleep_failure = kind("no memory")
    await dorm.ordered("a", Order.SLEEP, "stopped")
    assert (engine.stops, dorm.manager.used_bytes()) == (1, 0)
    second = await dorm.acquired("a")
    assert second is not engine
    assert dorm.manager.problem() is None


async def test_model_that_could_not_sleep_is_stopped_the_next_time(dorm: Pool) -> None:
    engine = await dorm.acquired("a")
    engine.sleep_failure = failed("no memory")
    await dorm.ordered("a", Order.SLEEP, "stopped")
    second = await dorm.acquired("a")
    await dorm.ordered("a", Order.SLEEP, "stopped")
    assert (second.levels, second.stops) == ([], 1)


@pytest.mark.parametrize("kind", [EngineError, RuntimeError])
async def test_engine_that_does_not_wake_is_ended_and_the_waiter_gets_a_new_one(
    dorm: Pool, kind: type[Exception]
) -> None:
    engine = await dorm.acquired("a")
    await dorm.ordered("a", Order.SLEEP, "asleep")
    engine.wake_failure = kind("no memory")
    second = await dorm.acquired("a")
    assert second is not engine
    assert (engine.stops, engine.gone.is_set(), second.phase) == (1, True, Phase.READY)
    status = dorm.manager.status()["a"]
    assert (status.loads, status.wakes, status.failure) == (2, 1, "")


async def test_engine_that_neither_sleeps_nor_ends_is_a_problem_of_the_replica(dorm: Pool) -> None:
    engine = await dorm.acquired("a")
    engine.sleep_failure, engine.resists = failed("no memory"), True
    dorm.manager.order("a", Order.SLEEP)
    await dorm.until(lambda: dorm.manager.problem() == "the engine of a could not be ended")
    engine.resists = False


async def test_engine_that_neither_wakes_nor_ends_is_a_problem_of_the_replica(dorm: Pool) -> None:
    engine = await dorm.acquired("a")
    await dorm.ordered("a", Order.SLEEP, "asleep")
    engine.wake_failure, engine.resists = failed("no memory"), True
    dorm.manager.order("a", Order.LOAD)
    await dorm.until(lambda: dorm.manager.problem() == "the engine of a could not be ended")
    engine.resists = False


async def test_engine_that_dies_while_it_drains_for_its_sleep_is_loaded_anew(dorm: Pool) -> None:
    engine = await dorm.acquired("a")
    engine.begin()
    await dorm.ordered("a", Order.SLEEP, "falling_asleep")
    await asyncio.wait_for(engine.asked_to_close.wait(), PATIENCE_S)
    engine.kill()
    engine.idle.set()
    await dorm.until(lambda: dorm.state("a") == "stopped")
    assert await dorm.acquired("a") is dorm.engines[1]


async def test_engine_that_dies_falling_asleep_is_loaded_anew(dorm: Pool) -> None:
    engine = await dorm.acquired("a")
    engine.nods_off.clear()
    dorm.manager.order("a", Order.SLEEP)
    await dorm.until(lambda: engine.levels)
    engine.kill()
    await dorm.until(lambda: dorm.state("a") == "stopped")
    assert dorm.manager.used_bytes() == 0
    assert await dorm.acquired("a") is dorm.engines[1]


async def test_engine_that_dies_asleep_is_loaded_anew(dorm: Pool) -> None:
    engine = await dorm.acquired("a")
    await dorm.ordered("a", Order.SLEEP, "asleep")
    engine.kill()
    await dorm.until(lambda: dorm.state("a") == "stopped")
    assert await dorm.acquired("a") is dorm.engines[1]


async def test_engine_that_dies_asleep_unnoticed_is_loaded_anew_for_its_waiter(dorm: Pool) -> None:
    engine = await dorm.acquired("a")
    await dorm.ordered("a", Order.SLEEP, "asleep")
    engine.kill()
    assert await dorm.acquired("a") is dorm.engines[1]


async def test_engine_that_dies_waking_is_loaded_anew_for_its_waiter(dorm: Pool) -> None:
    engine = await dorm.acquired("a")
    await dorm.ordered("a", Order.SLEEP, "asleep")
    engine.rises.clear()
    task = asyncio.create_task(dorm.acquired("a"))
    await dorm.until(lambda: engine.wakes)
    engine.kill()
    assert await task is dorm.engines[1]


async def test_sleeping_model_is_ended_after_its_idle_time(dorm: Pool) -> None:
    engine = await dorm.acquired("a")
    await dorm.ordered("a", Order.SLEEP, "asleep")
    dorm.now += 61
    await dorm.until(lambda: dorm.state("a") == "stopped")
    assert (engine.stops, engine.wakes) == (1, 0)


# Loads that are given up


async def left(pool: Pool, task: asyncio.Task[ScriptedEngine], model: str) -> None:
    """The only client of the model leaves."""
    task.cancel()
    await asyncio.wait([task])
    await pool.until(lambda: not pool.manager._policy._slots[model].waiting)


async def test_load_that_nobody_wants_is_given_up_for_a_model_that_is_waited_for(pool: Pool) -> None:
    (leaver,) = await waiting(pool, "a")
    await left(pool, leaver, "a")
    pool.loads_at_once = True
    other = asyncio.create_task(pool.acquired("b"))
    await pool.queued("b")
    assert pool.state("a") == "loading"
    pool.now += 11
    assert (await other).spec.model_id == "b"
    assert (pool.state("a"), pool.engines[0].gone.is_set()) == ("stopped", True)


async def test_load_that_somebody_wants_is_not_given_up(pool: Pool) -> None:
    leaver, stayer = await waiting(pool, "a", 2)
    leaver.cancel()
    await asyncio.wait([leaver])
    other = asyncio.create_task(pool.acquired("b"))
    await pool.queued("b")
    pool.now += 1000
    await pool.settled()
    assert pool.state("a") == "loading"
    pool.engines[0].load.set()
    assert await stayer is pool.engines[0]
    other.cancel()


async def test_model_that_came_up_when_its_load_was_given_up_makes_room_all_the_same(pool: Pool) -> None:
    (leaver,) = await waiting(pool, "a")
    await left(pool, leaver, "a")
    engine = pool.engines[0]
    engine.measured.clear()
    engine.load.set()
    await pool.until(lambda: not pool.manager._loading)
    pool.loads_at_once = True
    other = asyncio.create_task(pool.acquired("b"))
    await pool.queued("b")
    pool.now += 11
    assert (await other).spec.model_id == "b"
    assert (pool.state("a"), engine.stops) == ("stopped", 1)


async def test_load_that_was_given_up_does_not_pass_for_the_next_one(pool: Pool) -> None:
    (leaver,) = await waiting(pool, "a")
    await left(pool, leaver, "a")
    engine = pool.engines[0]
    engine.measured.clear()
    engine.load.set()
    await pool.until(lambda: not pool.manager._loading)
    await pool.ordered("a", Order.UNLOAD, "stopped")
    task = asyncio.create_task(pool.acquired("a"))
    await pool.until(lambda: len(pool.engines) == 2)
    engine.measured.set()
    # What is left of the first load ends; the second is under way.
    await pool.until(lambda: len(pool.manager._effects) == 1)
    await pool.settled()
    assert (pool.state("a"), task.done()) == ("loading", False)
    pool.engines[1].load.set()
    assert await task is pool.engines[1]


@pytest.mark.parametrize("abandoned", [True, False])
async def test_load_that_cannot_be_ended_keeps_its_memory_and_is_a_problem_of_the_replica(
    pool: Pool, abandoned: bool
) -> None:
    (leaver,) = await waiting(pool, "a")
    await left(pool, leaver, "a")
    engine = pool.engines[0]
    engine.resists = True
    if abandoned:
        pool.manager.order("a", Order.UNLOAD)
    else:
        engine.failure = StuckError("it was not ready, and cannot be ended")
        engine.load.set()
    await pool.until(lambda: pool.manager.problem() == "the engine of a could not be ended")
    assert pool.manager.used_bytes() == 10
    engine.resists = False


# Orders


async def test_model_is_loaded_on_an_order_though_nobody_asks_for_it(pool: Pool) -> None:
    await pool.ordered("a", Order.LOAD, "awake")
    assert await pool.acquired("a") is pool.engines[0]
    assert len(pool.engines) == 1


async def test_sleeping_model_is_woken_by_an_order_to_load(dorm: Pool) -> None:
    await dorm.ordered("a", Order.LOAD, "awake")
    await dorm.ordered("a", Order.SLEEP, "asleep")
    await dorm.ordered("a", Order.LOAD, "awake")
    assert (len(dorm.engines), dorm.engines[0].wakes) == (1, 1)


async def test_ordered_model_gets_room_as_one_that_is_waited_for_does(pool: Pool) -> None:
    await pool.acquired("a")
    pool.manager.order("b", Order.LOAD)
    await pool.queued("b")
    pool.now += LEASE_S + 1
    await pool.until(lambda: pool.state("b") == "awake")
    assert pool.state("a") == "stopped"


async def test_model_in_use_that_is_told_to_sleep_finishes_what_it_does_first(dorm: Pool) -> None:
    engine = await dorm.acquired("a")
    engine.begin()
    await dorm.until(lambda: dorm.manager.status()["a"].in_flight)
    await dorm.ordered("a", Order.SLEEP, "falling_asleep")
    await asyncio.wait_for(engine.asked_to_close.wait(), PATIENCE_S)
    assert (engine.closed, engine.levels) == (True, [])
    engine.finish()
    await dorm.until(lambda: dorm.state("a") == "asleep")
    assert engine.stops == 0


async def test_model_in_use_that_is_told_to_go_finishes_what_it_does_first(pool: Pool) -> None:
    engine = await pool.acquired("a")
    engine.begin()
    await pool.until(lambda: pool.manager.status()["a"].in_flight)
    await pool.ordered("a", Order.UNLOAD, "unloading")
    await asyncio.wait_for(engine.asked_to_close.wait(), PATIENCE_S)
    assert (engine.closed, engine.stops) == (True, 0)
    engine.finish()
    await pool.until(lambda: pool.state("a") == "stopped")


async def test_model_that_is_told_to_sleep_where_none_can_is_stopped(pool: Pool) -> None:
    await pool.acquired("a")
    await pool.ordered("a", Order.SLEEP, "stopped")


async def test_sleeping_model_that_is_told_to_go_is_ended_without_a_wake(dorm: Pool) -> None:
    engine = await dorm.acquired("a")
    await dorm.ordered("a", Order.SLEEP, "asleep")
    await dorm.ordered("a", Order.UNLOAD, "stopped")
    assert (engine.stops, engine.wakes) == (1, 0)


async def test_load_that_was_ordered_can_be_taken_back(pool: Pool) -> None:
    pool.loads_at_once = False
    await pool.ordered("a", Order.LOAD, "loading")
    await pool.until(lambda: pool.engines)
    await pool.ordered("a", Order.UNLOAD, "stopped")
    assert pool.engines[0].gone.is_set()


async def test_model_that_is_waited_for_is_not_sent_away(pool: Pool) -> None:
    (task,) = await waiting(pool, "a")
    pool.manager.order("a", Order.UNLOAD)
    await pool.settled()
    pool.engines[0].load.set()
    assert await task is pool.engines[0]


async def test_pinned_model_outlives_its_idle_time_and_refuses_others_its_room_until_it_is_unpinned(
    pool: Pool,
) -> None:
    await pool.ordered("a", Order.PIN, "awake")
    assert pool.manager.status()["a"].pinned
    pool.now += 1000
    refused = await pool.refusal("b")
    assert (refused.code, pool.state("a")) == ("no_room", "awake")
    pool.manager.order("a", Order.UNPIN)
    assert (await pool.acquired("b")).spec.model_id == "b"
    assert pool.state("a") == "stopped"


def order_refused(pool: Pool, model: str, order: Order) -> Refused:
    with pytest.raises(Refused) as refused:
        pool.manager.order(model, order)
    return refused.value


@pytest.mark.parametrize("order", [Order.LOAD, Order.PIN])
async def test_order_for_what_cannot_be_had_is_refused_with_the_reason(pool: Pool, order: Order) -> None:
    assert order_refused(pool, "huge", order).code == "never_fits"
    pool.failures.append(failed("no weights"))
    await pool.refusal("a")
    refused = order_refused(pool, "a", order)
    assert (refused.code, refused.reason, refused.retry_after_s) == ("load_failed", "no weights", 10)
    await pool.ordered("b", Order.PIN, "awake")
    pool.now += 11
    assert order_refused(pool, "a", order).code == "no_room"


@pytest.mark.parametrize("order", list(Order))
async def test_order_for_an_unknown_model_is_refused_and_harms_nobody(pool: Pool, order: Order) -> None:
    assert order_refused(pool, "nobody-knows-it", order).code == "unknown_model"
    assert await pool.acquired("a")


@pytest.mark.parametrize("order", list(Order))
async def test_order_to_a_replica_that_closes_is_refused(pool: Pool, order: Order) -> None:
    await pool.manager.close(0)
    assert order_refused(pool, "a", order).code == "closing"


@pytest.mark.parametrize("order", [Order.SLEEP, Order.UNLOAD, Order.UNPIN])
async def test_order_that_changes_nothing_is_taken(pool: Pool, order: Order) -> None:
    pool.manager.order("a", order)
    assert (await pool.acquired("a")).spec.model_id == "a"


async def test_order_does_not_inherit_the_patience_of_a_client_that_left_long_ago(pool: Pool) -> None:
    engine = await pool.acquired("a")
    engine.begin()
    await pool.until(lambda: pool.manager.status()["a"].in_flight)
    client = asyncio.create_task(pool.acquired("b"))
    await pool.queued("b")
    await left(pool, client, "b")
    pool.now += 3600
    pool.manager.order("b", Order.LOAD)
    await pool.queued("b")
    assert pool.state("a") == "awake"
    pool.now += 61
    await asyncio.wait_for(engine.asked_to_close.wait(), PATIENCE_S)


async def test_client_that_joins_an_order_does_not_send_it_to_the_end_of_the_queue(pool: Pool) -> None:
    engine = await pool.acquired("a")
    engine.begin()
    await pool.until(lambda: pool.manager.status()["a"].in_flight)
    pool.manager.order("b", Order.LOAD)
    await pool.queued("b")
    pool.now += 59
    client = asyncio.create_task(pool.acquired("b"))
    await pool.until(lambda: pool.manager._policy._slots["b"].waiting)
    pool.now += 2
    await asyncio.wait_for(engine.asked_to_close.wait(), PATIENCE_S)
    engine.finish()
    assert (await client).spec.model_id == "b"


# The end


async def test_closing_ends_sleeping_engines_without_waking_them(dorm: Pool) -> None:
    sleeper = await dorm.acquired("a")
    other = await dorm.swapped_for("b")
    assert dorm.state("a") == "asleep"
    await asyncio.wait_for(dorm.manager.close(PATIENCE_S), PATIENCE_S)
    assert (sleeper.gone.is_set(), other.gone.is_set(), sleeper.wakes) == (True, True, 0)


async def test_closing_ends_an_engine_that_hangs_falling_asleep(dorm: Pool) -> None:
    engine = await dorm.acquired("a")
    engine.nods_off.clear()
    dorm.manager.order("a", Order.SLEEP)
    await dorm.until(lambda: engine.levels)
    await asyncio.wait_for(dorm.manager.close(PATIENCE_S), PATIENCE_S)
    assert engine.gone.is_set()


async def test_closing_ends_an_engine_that_hangs_waking_and_refuses_who_waits(dorm: Pool) -> None:
    engine = await dorm.acquired("a")
    await dorm.ordered("a", Order.SLEEP, "asleep")
    engine.rises.clear()
    task = asyncio.create_task(dorm.refusal("a"))
    await dorm.until(lambda: engine.wakes)
    await asyncio.wait_for(dorm.manager.close(PATIENCE_S), PATIENCE_S)
    assert (await task).code == "closing"
    assert engine.gone.is_set()


# What is published


async def test_progress_of_a_wake_follows_the_clock_and_its_measured_time_is_remembered(dorm: Pool) -> None:
    engine = await dorm.acquired("a")
    await dorm.ordered("a", Order.SLEEP, "asleep")
    asleep = dorm.manager.status()["a"]
    assert (asleep.expected_wake_s, asleep.expected_load_s, asleep.progress) == (4, 20, 0)
    engine.rises.clear()
    task = asyncio.create_task(dorm.acquired("a"))
    await dorm.until(lambda: engine.wakes)
    dorm.now += 1
    waking = dorm.manager.status()["a"]
    assert (waking.state, waking.progress, waking.expected_wake_s) == ("waking", 0.25, 3)
    engine.rises.set()
    await task
    await dorm.ordered("a", Order.SLEEP, "asleep")
    assert dorm.manager.status()["a"].expected_wake_s == 1


async def test_models_that_wait_for_memory_know_their_place(pool: Pool) -> None:
    engine = await pool.acquired("a")
    engine.begin()
    await pool.until(lambda: pool.manager.status()["a"].in_flight)
    other = asyncio.create_task(pool.acquired("b"))
    await pool.queued("b")
    places = {model: (status.state, status.place) for model, status in pool.manager.status().items()}
    assert places == {"a": ("awake", 0), "b": ("stopped", 1)}
    other.cancel()


async def test_memory_is_published_as_it_is_taken(dorm: Pool) -> None:
    assert (dorm.manager.status(), dorm.manager.used_bytes()) == ({}, 0)
    await dorm.acquired("a")
    assert (dorm.manager.status()["a"].memory_bytes, dorm.manager.used_bytes()) == (10, 10)
    await dorm.ordered("a", Order.SLEEP, "asleep")
    assert dorm.manager.used_bytes() == 0
