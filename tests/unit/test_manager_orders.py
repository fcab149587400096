"""serve_app.residency.manager: the orders of operators, and what is published for them to see."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from managed_pool import PATIENCE_S, Pool, left, waiting, working
from scripted_engine import failed

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


async def test_pinned_model_that_dies_is_loaded_again_without_being_asked_for(pool: Pool) -> None:
    await pool.ordered("a", Order.PIN, "awake")
    pool.now += 100
    pool.engines[0].kill()
    await pool.until(lambda: len(pool.engines) == 2)
    await pool.until(lambda: pool.state("a") == "awake")
    assert pool.manager.status()["a"].pinned


async def test_model_whose_engine_is_replaced_is_made_anew_for_who_waits(pool: Pool) -> None:
    pool.loads_at_once = False
    asked = asyncio.create_task(pool.acquired("a"))
    await pool.until(lambda: pool.engines)
    pool.manager.replace("a")
    await pool.until(lambda: len(pool.engines) == 2)
    assert not asked.done()
    pool.engines[1].load.set()
    assert await asked is pool.engines[1]
