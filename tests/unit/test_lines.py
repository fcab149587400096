"""How long a refused client is told to stay away: from what was measured, in simulated time."""

from __future__ import annotations

import asyncio
import math
from collections import Counter

import pytest

from serve_app.errors import ApiError
from serve_app.model_schema import Queue
from serve_app.router.lines import Line


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def retry_after(line: Line) -> float:
    """What a request hears that finds the queue full."""
    with pytest.raises(ApiError) as refused:
        await line.turn("k", 0)
    assert (refused.value.status, refused.value.code) == (503, "overloaded")
    return refused.value.retry_after_s or 0.0


async def busy(line: Line, clock: Clock, answers: int, seconds: float) -> None:
    """So many answers, one after another, each of so long, while others wait."""
    line.started("k")
    for _ in range(answers):
        clock.now += seconds
        waiting = asyncio.ensure_future(line.turn("k", 0))
        await asyncio.sleep(0)
        line.ended("k")
        await waiting
        line.started("k")


@pytest.mark.parametrize("answer_s", [0.05, 2.0, 30.0])
async def test_client_is_told_what_those_before_it_will_take(answer_s: float) -> None:
    clock = Clock()
    line = Line("m", Queue(size=3, wait_s=1e9), clock=clock)
    await busy(line, clock, 100, answer_s)
    waiting = [asyncio.ensure_future(line.turn("k", 0)) for _ in range(3)]
    await asyncio.sleep(0)
    assert await retry_after(line) == pytest.approx(max(1.0, 4 * answer_s), rel=0.1)
    for turn in waiting:
        turn.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_quiet_night_does_not_keep_clients_away_in_the_morning() -> None:
    clock = Clock()
    line = Line("m", Queue(size=1, wait_s=1e9), clock=clock)
    await busy(line, clock, 20, 1.0)
    line.ended("k")
    for _ in range(5):
        clock.now += 8 * 3600
        line.started("k")
        line.ended("k")
    line.started("k")
    waiting = asyncio.ensure_future(line.turn("k", 0))
    await asyncio.sleep(0)
    assert await retry_after(line) < 5
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_nothing_of_a_request_stays_behind() -> None:
    line = Line("m", Queue(size=9, wait_s=1e9))
    waiting = [asyncio.ensure_future(line.turn(f"k{n}", 0)) for n in range(5)]
    await asyncio.sleep(0)
    for turn in waiting:
        turn.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (len(line), line._turns) == (0, {})


async def test_a_crowd_that_is_refused_together_does_not_come_back_together() -> None:
    clock = Clock()
    line = Line("m", Queue(size=1, wait_s=1e9), clock=clock)
    await busy(line, clock, 200, 0.5)
    waiting = asyncio.ensure_future(line.turn("k", 0))
    await asyncio.sleep(0)
    told = [await retry_after(line) for _ in range(100)]
    assert told[0] == pytest.approx(1.0, rel=0.1)
    assert max(told) <= 32
    # Two places are freed in a second. The crowd is spread over half a minute, and no longer.
    assert max(Counter(map(math.floor, told)).values()) <= 5
    clock.now += 60
    assert await retry_after(line) == pytest.approx(1.0, rel=0.1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
