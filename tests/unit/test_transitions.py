"""serve_app.residency.manager: every change of a model's state is told once, in order, with the time before it."""

from collections.abc import AsyncIterator

import pytest
from managed_pool import Pool, working
from scripted_engine import failed

from serve_app.residency.manager import Refused


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    async with working(Pool()) as pool:
        yield pool


async def test_swap_of_two_models_is_told_in_order(pool: Pool) -> None:
    await pool.acquired("a")
    await pool.swapped_for("b")
    assert [step for step in pool.transitions if step[0] == "a"] == [
        ("a", "stopped", "loading"),
        ("a", "loading", "awake"),
        ("a", "awake", "unloading"),
        ("a", "unloading", "stopped"),
    ]
    assert [step for step in pool.transitions if step[0] == "b"] == [
        ("b", "stopped", "loading"),
        ("b", "loading", "awake"),
    ]


async def test_sleep_and_wake_are_told() -> None:
    async with working(Pool(host_bytes=100)) as dorm:
        await dorm.acquired("a")
        await dorm.swapped_for("b")
        await dorm.swapped_for("a")
        assert [(was, now) for model, was, now in dorm.transitions if model == "a"] == [
            ("stopped", "loading"),
            ("loading", "awake"),
            ("awake", "falling_asleep"),
            ("falling_asleep", "asleep"),
            ("asleep", "waking"),
            ("waking", "awake"),
        ]


async def test_failed_load_is_told_as_failed(pool: Pool) -> None:
    pool.failures = [failed("no such file")]
    with pytest.raises(Refused):
        await pool.acquired("a")
    assert pool.transitions == [("a", "stopped", "loading"), ("a", "loading", "failed")]


async def test_death_of_an_engine_leads_straight_from_awake_to_where_no_unload_does(pool: Pool) -> None:
    engine = await pool.acquired("a")
    engine.kill()
    await pool.until(lambda: pool.state("a") != "awake")
    assert pool.transitions[2][:2] == ("a", "awake")
    assert pool.transitions[2][2] in ("failed", "stopped")
