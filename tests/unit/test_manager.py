"""serve_app.residency.manager: what waits is answered, whatever engines, clients and the clock do."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from managed_pool import PATIENCE_S, Pool, left, waiting, working
from scripted_engine import failed

from serve_app.engines.base import StuckError
from serve_app.residency.demand import PoolDemand
from serve_app.residency.events import Order
from serve_app.residency.manager import Refused
from serve_app.residency.victims import LEASE_S


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    async with working(Pool()) as pool:
        yield pool


@pytest.fixture
async def dorm() -> AsyncIterator[Pool]:
    """A pool whose models sleep."""
    async with working(Pool(host_bytes=100)) as pool:
        yield pool


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


# Loads that are given up


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


async def test_engine_whose_memory_cannot_be_measured_answers_all_the_same(pool: Pool) -> None:
    def lost() -> int:
        raise OSError("GPU is lost")

    pool.loads_at_once = False
    asked = asyncio.create_task(pool.acquired("a"))
    await pool.until(lambda: pool.engines)
    pool.engines[0].memory_bytes = lost  # type: ignore[method-assign]
    pool.engines[0].load.set()
    assert await asked is pool.engines[0]
    assert pool.manager.status()["a"].memory_bytes == 10
