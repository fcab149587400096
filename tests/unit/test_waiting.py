"""serve_app.models.waiting: who asks again every few seconds keeps its place in between."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from managed_pool import Pool, working

from serve_app.engines.base import Engine
from serve_app.models import waiting as waiting_module
from serve_app.models.waiting import Waiting

A_TURN_S = 0.01


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[Pool]:
    async with working(Pool()) as it:
        yield it


async def turn(waiting: Waiting[Engine], model: str) -> None:
    """Ask, and be told to ask again."""
    with pytest.raises(TimeoutError):
        await waiting.acquire(model, A_TURN_S)


async def test_place_in_the_queue_is_kept_between_two_turns_and_what_comes_then_is_not_lost(pool: Pool) -> None:
    waiting: Waiting[Engine] = Waiting(pool.manager.acquire)
    a = await pool.acquired("a")
    a.in_flight = 1
    for _ in range(5):
        await turn(waiting, "b")
        await pool.settled()
        assert pool.manager.status()["b"].place == 1
    a.in_flight = 0
    pool.now += 30
    await pool.until(lambda: pool.state("b") == "awake")
    assert await waiting.acquire("b", A_TURN_S) is pool.engines[-1]
    assert pool.manager.status()["b"].loads == 1


async def test_load_of_many_turns_is_one_load_even_where_others_wait_for_its_room(pool: Pool) -> None:
    pool.loads_at_once = False
    waiting: Waiting[Engine] = Waiting(pool.manager.acquire)
    await turn(waiting, "a")
    rival = asyncio.create_task(pool.manager.acquire("b"))
    pool.now += 1000  # beyond the time for which a load outlives its last client
    for _ in range(5):
        await turn(waiting, "a")
        await pool.settled()
    assert pool.state("a") == "loading"
    pool.engines[0].load.set()
    await pool.until(lambda: pool.state("a") == "awake")
    assert await waiting.acquire("a", A_TURN_S) is pool.engines[0]
    rival.cancel()


async def test_several_who_ask_have_a_claim_each(pool: Pool) -> None:
    pool.loads_at_once = False
    waiting: Waiting[Engine] = Waiting(pool.manager.acquire)
    for _ in range(3):
        await asyncio.gather(turn(waiting, "a"), turn(waiting, "a"))
        assert pool.manager.demand().held == 2


async def test_who_does_not_come_back_or_is_cancelled_gives_its_place_up(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting_module, "COMES_BACK_S", 0.02)
    pool.loads_at_once = False
    waiting: Waiting[Engine] = Waiting(pool.manager.acquire)
    await turn(waiting, "a")
    asking = asyncio.create_task(waiting.acquire("a", 60))
    await asyncio.sleep(0.05)  # the claim that it took up is not given up by the clock
    assert pool.manager.demand().held == 1
    asking.cancel()
    await pool.until(lambda: pool.manager.demand().held == 0)
    await turn(waiting, "a")
    await pool.until(lambda: pool.manager.demand().held == 0)
    assert not waiting._between
