"""serve_app.router.schedule: what is due by the clock of a place, and models that are there before anybody asks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from scripted_pool import SECRET, Pool

from serve_app.config import Config
from serve_app.models.replicas import PublishedModel, Replica, set_replicas
from serve_app.router import schedule as schedule_module
from serve_app.router.app import RouterApp
from serve_app.router.schedule import Schedule, due

PATIENCE_S = 5.0
LOOK = timedelta(seconds=15)


def config(*models: dict[str, Any]) -> Config:
    """The lazy models m0, m1, …, each with these fields."""
    hot = {"id": "hot", "tier": "resident", "source": "org/hot", "context": 4096}
    lazy = [
        {"id": f"m{i}", "tier": "lazy", "source": "org/m", "context": 2048, **fields} for i, fields in enumerate(models)
    ]
    return Config.model_validate({"models": [hot, *lazy], "audit": {"sink": "none"}})


def times(lines: list[str], start: datetime, hours: float) -> list[str]:
    """When a Router that looks every 15 s from `start` on finds the model due, as the wall clocks of its zone say."""
    models = config({"warm_at": lines}).lazy
    found = []
    after = start.astimezone(UTC)
    end = after + timedelta(hours=hours)
    while after < end:
        until = after + LOOK
        if due(models, after.astimezone(start.tzinfo), until.astimezone(start.tzinfo)):
            found.append(until.astimezone(start.tzinfo).strftime("%a %d %H:%M"))
        after = until
    return found


def at(text: str, zone: str = "UTC") -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone))


# 1 June 2026 is a Monday. The looks are at :05, :20, :35 and :50, so each time is seen five seconds late.
MONDAY = at("2026-06-01T00:00:05")


@pytest.mark.parametrize(
    ("lines", "days", "found"),
    [
        (["30 8 * * *"], 3, ["Mon 01 08:30", "Tue 02 08:30", "Wed 03 08:30"]),
        (["30 8 * * mon-fri"], 7, [f"{day} 08:30" for day in ("Mon 01", "Tue 02", "Wed 03", "Thu 04", "Fri 05")]),
        (["0 9 * * sat,sun"], 7, ["Sat 06 09:00", "Sun 07 09:00"]),
        (["0 9 2 * *"], 7, ["Tue 02 09:00"]),
        (["0 */8 * * *"], 1, ["Mon 01 08:00", "Mon 01 16:00", "Tue 02 00:00"]),
        (["30 8 * * *", "0 20 * * mon"], 2, ["Mon 01 08:30", "Mon 01 20:00", "Tue 02 08:30"]),
        (["30 8 * * *", "30 8 * * mon"], 1, ["Mon 01 08:30"]),
        (["0 9 * 7 *"], 7, []),
    ],
)
def test_model_is_due_once_at_each_of_its_times(lines: list[str], days: int, found: list[str]) -> None:
    assert times(lines, MONDAY, 24 * days) == found


@pytest.mark.parametrize(
    ("after", "until", "is_due"),
    [
        ("08:29:59", "08:30:00", True),
        ("08:29:59.900", "08:30:00", True),
        ("08:30:00", "08:30:15", False),
        ("08:30:00.500", "08:30:15", False),
        ("08:29:45", "08:29:59.999", False),
        ("08:00:00", "09:00:00", True),
        ("09:00:00", "09:00:00", False),
    ],
)
def test_time_is_due_after_the_one_look_and_at_the_latest_at_the_other(after: str, until: str, is_due: bool) -> None:
    models = config({"warm_at": ["30 8 * * *"]}).lazy
    assert bool(due(models, at(f"2026-06-01T{after}"), at(f"2026-06-01T{until}"))) is is_due


def test_only_the_models_whose_time_it_is_are_due() -> None:
    models = config({"warm_at": ["30 8 * * *"]}, {"warm_at": ["0 9 * * *"]}, {"warm_at": ["0 1 * * *", "30 8 * * *"]})
    found = due(models.lazy, at("2026-06-01T08:29:50"), at("2026-06-01T08:30:05"))
    assert [model.id for model in found] == ["m0", "m2"]


def test_times_are_those_of_the_zone() -> None:
    start = at("2026-06-01T00:00:05", "Asia/Shanghai")
    assert times(["30 8 * * mon"], start, 24) == ["Mon 01 08:30"]
    # The same Monday morning is the evening before in New York.
    assert times(["30 20 * * sun"], at("2026-05-31T12:00:05", "America/New_York"), 12) == ["Sun 31 20:30"]


# In New York the clocks go from 2 to 3 on 8 March 2026, and from 2 back to 1 on 1 November.
SPRING = at("2026-03-08T00:00:05", "America/New_York")
AUTUMN = at("2026-11-01T00:00:05", "America/New_York")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("30 1 * * *", ["01:30"]),
        ("30 2 * * *", ["03:00"]),  # the hour is skipped: at once after it
        ("30 3 * * *", ["03:30"]),
        ("0 * * * *", ["01:00", "03:00", "04:00"]),
    ],
)
def test_time_that_is_skipped_in_spring_is_made_up_for(line: str, found: list[str]) -> None:
    assert times([line], SPRING, 3.1) == [f"Sun 08 {time}" for time in found]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("30 0 * * *", ["00:30"]),
        ("30 1 * * *", ["01:30"]),  # there twice, and due once
        ("59 1 * * *", ["01:59"]),
        ("30 2 * * *", ["02:30"]),
        ("0 * * * *", ["01:00", "01:00", "02:00", "03:00"]),
        ("*/30 * * * *", ["00:30", "01:00", "01:30", "01:00", "01:30", "02:00", "02:30", "03:00"]),
    ],
)
def test_hour_that_comes_twice_in_autumn_is_no_reason_to_do_things_twice(line: str, found: list[str]) -> None:
    assert times([line], AUTUMN, 4.1) == [f"Sun 01 {time}" for time in found]


# The loop


class Clock:
    """A clock that a test moves; counts how often it was looked at."""

    def __init__(self, start: str) -> None:
        self.at = at(start)
        self.looks = 0

    def __call__(self, zone: ZoneInfo) -> datetime:
        self.looks += 1
        return self.at.astimezone(zone)


class Running:
    """A schedule at work on a router's fleet, and the pool that hears of it."""

    def __init__(self, pool: Pool, clock: Clock, task: asyncio.Task[None]) -> None:
        self.pool, self.clock, self.task = pool, clock, task

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # the turns of the schedule are what is waited for
                assert not self.task.done(), "the schedule has ended"
                await asyncio.sleep(0)

    async def looked(self) -> None:
        """Wait until it has looked anew, and done what it found."""
        looks = self.clock.looks
        await self.until(lambda: self.clock.looks >= looks + 2)

    def loaded(self) -> list[str]:
        assert all((order, only) == ("load", None) for _, order, only in self.pool.orders)
        return [model for model, _, _ in self.pool.orders]


@contextlib.asynccontextmanager
async def running(
    settings: Config, start: str = "2026-06-01T08:29:50", answers: list[dict[str, Any] | Exception] | None = None
) -> AsyncIterator[Running]:
    pool, clock = Pool(), Clock(start)
    pool.order_answers = answers or []
    app = RouterApp(settings, {model.id: "Pool" for model in settings.models}, pool, "test")
    task = asyncio.create_task(Schedule(settings.models, app.fleet, settings.pool.timezone, now=clock).run())
    yield Running(pool, clock, task)
    task.cancel()
    await asyncio.wait([task])


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(schedule_module, "_LOOK_EVERY_S", 0)
    yield
    set_replicas("Pool", [])


def publish(*replicas: dict[str, PublishedModel]) -> None:
    set_replicas("Pool", [Replica(f"pool-{i}", {}, SECRET, models, True) for i, models in enumerate(replicas)])


async def test_model_is_loaded_once_when_its_time_comes_and_again_the_next_day() -> None:
    async with running(config({"warm_at": ["30 8 * * *"]})) as it:
        await it.looked()
        assert it.loaded() == []
        it.clock.at += LOOK
        await it.looked()
        await it.looked()
        assert it.loaded() == ["m0"]
        it.clock.at += timedelta(days=1)
        await it.looked()
        assert it.loaded() == ["m0", "m0"]


async def test_times_that_passed_before_the_start_are_not_made_up_for() -> None:
    async with running(config({"warm_at": ["30 8 * * *"]}), "2026-06-01T08:31:00") as it:
        await it.looked()
        assert it.loaded() == []


async def test_preloaded_model_is_asked_for_until_it_is_on_its_way_and_then_left_alone() -> None:
    async with running(config({"preload": True}, {})) as it:
        await it.until(lambda: len(it.pool.orders) > 1)
        assert set(it.loaded()) == {"m0"}
        publish({"m0": PublishedModel("loading", loads=1)})
        await it.looked()
        before = len(it.pool.orders)
        await it.looked()
        await it.looked()
        assert len(it.pool.orders) == before


async def test_preloaded_model_is_loaded_again_after_its_replica_was_replaced() -> None:
    async with running(config({"preload": True})) as it:
        publish({"m0": PublishedModel("awake", loads=1)})
        await it.looked()
        it.pool.orders.clear()
        await it.looked()
        assert it.loaded() == []
        publish({})
        await it.looked()
        assert "m0" in it.loaded()


@pytest.mark.parametrize(
    "found",
    [
        PublishedModel("stopped", loads=1),
        PublishedModel("failed", loads=1),
        PublishedModel("asleep", loads=1),
        PublishedModel("unloading", loads=1),
    ],
)
async def test_preloaded_model_that_has_gone_since_is_not_brought_back(found: PublishedModel) -> None:
    publish({}, {"m0": found})
    async with running(config({"preload": True})) as it:
        await it.looked()
        assert it.loaded() == []


async def test_preloaded_model_whose_time_it_is_is_asked_for_once_a_look() -> None:
    publish({"m0": PublishedModel("awake", loads=1)})
    async with running(config({"preload": True, "warm_at": ["30 8 * * *", "30 8 * * mon"]})) as it:
        await it.looked()
        publish({})
        it.clock.at += LOOK
        await it.until(lambda: it.pool.orders)
        assert it.loaded() == ["m0"]


REFUSED: dict[str, Any] = {"refused": {"code": "no_room", "reason": "pinned models", "retry_after_s": 60}}


@pytest.mark.parametrize("answer", [REFUSED, TimeoutError(), RuntimeError("actor died")])
async def test_load_that_does_not_succeed_is_logged_and_holds_up_nobody(
    answer: dict[str, Any] | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    models = config({"warm_at": ["30 8 * * *"]}, {"warm_at": ["30 8 * * *"]})
    async with running(models, answers=[answer]) as it:
        await it.looked()
        it.clock.at += LOOK
        await it.looked()
        assert it.loaded() == ["m0", "m1"]
        assert "m0 could not be loaded ahead" in caplog.text
        assert "m1 could not" not in caplog.text
        it.clock.at += timedelta(days=1)
        await it.looked()
        assert it.loaded() == ["m0", "m1"] * 2


async def test_schedule_with_nothing_to_do_ends() -> None:
    async with running(config({}, {})) as it:
        await asyncio.wait_for(it.task, PATIENCE_S)
        assert it.pool.orders == []


@pytest.mark.parametrize(("front_door", "loaded"), [(True, {"m0"}), (False, set())])
async def test_router_keeps_the_schedule_while_it_serves_its_front_door(front_door: bool, loaded: set[str]) -> None:
    pool = Pool()
    settings = config({"preload": True})
    app = RouterApp(settings, {model.id: "Pool" for model in settings.models}, pool, "test", front_door=front_door)
    incoming: asyncio.Queue[Any] = asyncio.Queue()
    outgoing: asyncio.Queue[Any] = asyncio.Queue()
    serving = asyncio.create_task(app({"type": "lifespan"}, incoming.get, outgoing.put))
    async with asyncio.timeout(PATIENCE_S):
        incoming.put_nowait({"type": "lifespan.startup"})
        assert (await outgoing.get())["type"] == "lifespan.startup.complete"
        while loaded and not pool.orders:  # noqa: ASYNC110 # its turns are what is waited for
            await asyncio.sleep(0)
        incoming.put_nowait({"type": "lifespan.shutdown"})
        assert (await outgoing.get())["type"] == "lifespan.shutdown.complete"
        await serving
    assert {model for model, _, _ in pool.orders} == loaded


async def test_preloaded_model_leaves_a_pool_at_zero_that_has_gone_there() -> None:
    async with running(config({"preload": True})) as it:
        await it.until(lambda: it.pool.orders)
        publish({"m0": PublishedModel("awake", loads=1)})
        await it.looked()
        set_replicas("Pool", [])
        await it.looked()
        before = len(it.pool.orders)
        await it.looked()
        await it.looked()
        assert len(it.pool.orders) == before
