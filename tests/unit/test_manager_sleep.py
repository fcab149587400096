"""serve_app.residency.manager: models that fall asleep and wake, and engines that fail at it or die of it."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from managed_pool import PATIENCE_S, Pool, working
from scripted_engine import failed

from serve_app.engines.base import EngineError, Phase
from serve_app.residency.events import Order


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    async with working(Pool()) as pool:
        yield pool


@pytest.fixture
async def dorm() -> AsyncIterator[Pool]:
    """A pool whose models sleep."""
    async with working(Pool(host_bytes=100)) as pool:
        yield pool


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
