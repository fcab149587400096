"""`GET /v1/router/events`: what a viewer is told, whose requests it sees, how often, at whose cost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from asgi_call import PATIENCE_S, Call
from front import DONE, HOT, body, by, front, key, settings, until
from front_door import connected, front_doors, request
from scripted_pool import SECRET, Pool
from scripted_upstream import Upstream
from test_traffic import BEGAN, record

from serve_app.models.replicas import PublishedModel, Replica, set_replicas
from serve_app.router import events
from serve_app.router.app import RouterApp
from serve_app.router.live import LiveApp
from serve_app.telemetry.audit import read_records
from serve_app.telemetry.traffic import STEP_S, Traffic

EVENTS = "/v1/router/events"
FIRST = ["hello", "models", "traffic", "requests"]
SECRET_WORD = "xylophone"
OTHER = {"id": "other", "tier": "resident", "source": "org/other", "context": 4096}


class DoorCall(Call):
    through = "door"


def told(call: Call) -> list[tuple[str, Any]]:
    """Every whole event so far: its name and its data."""
    blocks = call.body.decode().split("\n\n")[:-1]
    pairs = [block.removeprefix("event: ").split("\ndata: ") for block in blocks]
    return [(name, json.loads(data)) for name, data in pairs]


def of(call: Call, name: str) -> list[Any]:
    return [data for found, data in told(call) if found == name]


@contextlib.asynccontextmanager
async def watching(app: Any, *, headers: dict[str, str] | None = None, kind: type[Call] = Call) -> AsyncIterator[Call]:
    """A viewer that has been told how things are, and leaves at the end."""
    call = kind(app, path=EVENTS, method="GET", headers=headers)
    try:
        await call.until(lambda call: call.messages and (call.status != 200 or len(told(call)) >= len(FIRST)))
        yield call
    finally:
        call.disconnect()
        await call.done()


async def once(app: Any, headers: dict[str, str] | None = None) -> Call:
    return await Call(app, path=EVENTS, query="once=true", method="GET", headers=headers).done()


class Pacer:
    """The feed's clock and its pauses: time goes on when the test says so, beat by beat, from `at`."""

    def __init__(self, app: RouterApp, at: float = BEGAN) -> None:
        self.now = at
        app._traffic = app._feed._traffic = Traffic(BEGAN)
        self._due = asyncio.Event()
        self._waits = asyncio.Event()
        app._feed._clock = lambda: self.now
        app._feed._pause = self.pause

    async def pause(self, seconds: float) -> None:
        self._waits.set()
        await self._due.wait()
        self._due.clear()
        self.now += seconds

    async def beat(self) -> None:
        """The next beat, and all that viewers are told by it."""
        async with asyncio.timeout(PATIENCE_S):
            await self._waits.wait()
            self._waits.clear()
            self._due.set()
            await self._waits.wait()
        for _ in range(10):
            await asyncio.sleep(0)


# What is told


async def test_a_viewer_hears_how_things_are_and_then_what_happens() -> None:
    async with front(DONE) as (app, _), watching(app) as viewer:
        assert viewer.headers["content-type"] == "text/event-stream"
        assert [name for name, _ in told(viewer)] == FIRST
        (hello,) = of(viewer, "hello")
        assert (hello["admin"], hello["default"], hello["models"]) == (True, HOT, [HOT])
        assert of(viewer, "models")[0]["models"][0]["last_used_s"] is None
        await Call(app, body()).done()
        await viewer.until(lambda call: len(of(call, "requests")) > 1 and len(of(call, "models")) > 1)
        (seen,) = of(viewer, "requests")[-1]["requests"]
        assert (seen["model"], seen["status"], seen["completion_tokens"]) == (HOT, 200, 2)
        assert [step["name"] for step in seen["steps"]] == ["admit", "decide", "relay"]
        ends = [step["to_ms"] for step in seen["steps"]]
        assert ends == sorted(ends)
        assert ends[-1] == pytest.approx(seen["total_ms"], abs=0.2)
        points = [point for event in of(viewer, "traffic")[1:] for point in event["points"]]
        assert {point["requests"] for point in points} == {0, 1} or points[0]["requests"] == 1
        assert 0 <= of(viewer, "models")[-1]["models"][0]["last_used_s"] < PATIENCE_S


async def test_steps_of_a_request_do_not_go_into_the_audit(tmp_path: Path) -> None:
    audit = {"sink": "file", "directory": str(tmp_path)}
    async with front(DONE, audit=audit) as (app, _):
        await Call(app, body()).done()
        assert of(await once(app), "requests")[0]["requests"][0]["steps"]
    (line,) = read_records(tmp_path, 0)
    assert "steps" not in line


async def test_one_look_ends_by_itself() -> None:
    async with front(DONE) as (app, _):
        await Call(app, body()).done()
        call = await once(app)
        assert [name for name, _ in told(call)] == FIRST
        assert len(of(call, "requests")[0]["requests"]) == 1
        assert app._feed._task is None


async def test_a_head_and_a_wrong_query_open_no_stream() -> None:
    async with front(DONE) as (app, _):
        head = await Call(app, path=EVENTS, method="HEAD").done()
        assert (head.status, head.body) == (200, b"")
        wrong = await Call(app, path=EVENTS, query="once=maybe", method="GET").done()
        assert (wrong.status, wrong.error["param"]) == (400, "once")


# Rights


async def test_a_key_sees_its_own_models_and_requests_and_nobody_sees_a_prompt() -> None:
    keys = [key("mine", models=[HOT]), key("yours"), key("boss", admin=True)]
    async with front(DONE, models=[OTHER], security={"keys": keys}) as (app, _), contextlib.AsyncExitStack() as stack:
        viewers = {
            name: await stack.enter_async_context(watching(app, headers=by(name))) for name in ("mine", "yours", "boss")
        }
        await Call(app, body(SECRET_WORD, model=HOT), headers=by("mine")).done()
        await Call(app, body(SECRET_WORD, model="other"), headers=by("yours")).done()
        await Call(app, body(SECRET_WORD, model="other"), headers=by("nobody")).done()
        await viewers["boss"].until(
            lambda call: (
                sum(len(event["requests"]) for event in of(call, "requests")) == 3 and len(of(call, "traffic")) > 1
            )
        )
        await viewers["yours"].until(lambda call: len(of(call, "traffic")) > 1)
        await viewers["mine"].until(lambda call: len(of(call, "traffic")) > 1)
        looks = {name: await once(app, by(name)) for name in viewers}
        for name, whose in (("mine", {"mine"}), ("yours", {"yours"}), ("boss", {"mine", "yours", ""})):
            for call in (viewers[name], looks[name]):
                shown = [each for event in of(call, "requests") for each in event["requests"]]
                assert {each["key"] for each in shown} == whose
                newest = {point["t"]: point["requests"] for event in of(call, "traffic") for point in event["points"]}
                assert sum(newest.values()) == len(whose)
                assert SECRET_WORD.encode() not in call.body
                assert b"-key" not in call.body
        for name, models in (("mine", [HOT]), ("yours", [HOT, "other"]), ("boss", [HOT, "other"])):
            assert of(viewers[name], "hello")[0]["models"] == models
            assert all([one["id"] for one in event["models"]] == models for event in of(viewers[name], "models"))


async def test_without_a_key_nobody_watches() -> None:
    async with front(DONE, security={"keys": [key("mine")]}) as (app, _):
        assert (await once(app)).error["code"] == "missing_api_key"
        call = await Call(app, path=EVENTS, method="GET", headers=by("wrong")).done()
        assert call.error["code"] == "invalid_api_key"


async def test_a_key_that_is_taken_away_watches_no_longer(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump([key("mine"), key("yours")]))
    async with (
        front(DONE, security={"keys_file": str(file)}) as (app, _),
        watching(app, headers=by("mine")) as mine,
        watching(app, headers=by("yours")) as yours,
    ):
        file.write_text(yaml.safe_dump([key("yours")]))
        await mine.until(lambda call: told(call)[-1][0] == "bye")
        await mine.done()
        assert not of(yours, "bye")


# How often


async def test_a_burst_becomes_four_events_a_second_at_most() -> None:
    async with front(DONE) as (app, _):
        pacer = Pacer(app)
        async with watching(app) as viewer:
            for second in range(10):
                before = len(told(viewer))
                for beat in range(2):
                    for number in range(500):
                        app._traffic.take(record(pacer.now, request=f"{second}-{beat}-{number}"))
                    await pacer.beat()
                new = [name for name, _ in told(viewer)[before:]]
                assert sorted(new) == ["models", "requests", "requests", "traffic"]
            assert all(len(event["requests"]) <= 20 for event in of(viewer, "requests"))
            assert of(viewer, "requests")[-1]["requests"][-1]["request"] == "9-1-499"
            points = {point["t"]: point["requests"] for event in of(viewer, "traffic") for point in event["points"]}
            assert sum(points.values()) == 10 * 2 * 500


async def test_where_nothing_happens_a_viewer_hears_only_that_time_goes_on() -> None:
    async with front(DONE) as (app, _):
        pacer = Pacer(app)
        async with watching(app) as viewer:
            for _ in range(4 * STEP_S):  # two beats a second
                await pacer.beat()
            new = told(viewer)[len(FIRST) :]
            assert [name for name, _ in new] == ["traffic", "traffic"]


async def test_who_comes_late_hears_how_long_ago_a_model_was_used() -> None:
    async with front(DONE) as (app, _):
        pacer = Pacer(app)
        async with watching(app):
            app._traffic.take(record(pacer.now, model=HOT))
            for _ in range(20):
                await pacer.beat()
            async with watching(app) as late:
                (said,) = of(late, "models")
                assert (said["at"], said["models"][0]["last_used_s"]) == (BEGAN + 10, 10)


async def test_the_last_of_a_step_is_told_though_the_next_one_has_begun() -> None:
    async with front(DONE) as (app, _):
        pacer = Pacer(app, at=BEGAN + 4)
        async with watching(app) as viewer:
            app._traffic.take(record(pacer.now + 0.7))
            await pacer.beat()
            await pacer.beat()
            assert [(point["t"], point["requests"]) for point in of(viewer, "traffic")[-1]["points"]] == [
                (BEGAN, 1),
                (BEGAN + STEP_S, 0),
            ]


async def test_a_viewer_that_comes_again_gets_the_last_15_minutes() -> None:
    async with front(DONE) as (app, _):
        pacer = Pacer(app)
        async with watching(app):
            for number in range(300):
                app._traffic.take(record(BEGAN + number * STEP_S, request=number))
        pacer.now = BEGAN + 299 * STEP_S
        async with watching(app) as again:
            points = of(again, "traffic")[0]["points"]
            assert len(points) == 180
            assert points[-1]["t"] - points[0]["t"] == 15 * 60 - STEP_S
            assert all(point["requests"] == 1 for point in points)
            assert [each["request"] for each in of(again, "requests")[0]["requests"]] == list(range(250, 300))


async def test_nobody_misses_or_doubles_a_request_whenever_he_comes() -> None:
    async with front(DONE) as (app, _):
        pacer = Pacer(app)
        async with contextlib.AsyncExitStack() as stack:
            viewers = [await stack.enter_async_context(watching(app))]
            for number in range(30):
                app._traffic.take(record(pacer.now, request=number))
                if number % 2:
                    viewers.append(await stack.enter_async_context(watching(app)))
                if number % 3 == 0:
                    await pacer.beat()
            await pacer.beat()
            for viewer in viewers:
                shown = [each["request"] for event in of(viewer, "requests") for each in event["requests"]]
                assert shown == list(range(30))


# What it costs


@pytest.mark.parametrize("kind", [Call, DoorCall])
async def test_a_viewer_that_leaves_leaves_nothing_behind(kind: type[Call]) -> None:
    async with front(DONE) as (app, _):
        before = asyncio.all_tasks()
        async with watching(app, kind=kind), watching(app, kind=kind):
            assert app._feed.viewers == app._open == 2
        await until(lambda: asyncio.all_tasks() == before, "no task is left")
        assert app._feed.viewers == app._open == 0
        assert not app._feed._groups


async def test_viewers_are_bounded_and_who_leaves_makes_room() -> None:
    async with front(DONE, router={"viewers": 2}) as (app, _), watching(app):
        async with watching(app):
            refused = await Call(app, path=EVENTS, method="GET").done()
            assert (refused.status, refused.error["code"]) == (503, "too_many_viewers")
            assert int(refused.headers["retry-after"]) > 0
            assert (await once(app)).status == 200
        async with watching(app) as third:
            assert third.status == 200


async def test_the_last_quarter_of_the_places_is_kept_for_operators() -> None:
    sections = {"router": {"viewers": 4}, "security": {"keys": [key("mine"), key("boss", admin=True)]}}
    async with front(DONE, **sections) as (app, _), contextlib.AsyncExitStack() as stack:
        for name, status in [*[("mine", 200)] * 3, ("mine", 503), ("boss", 200), ("boss", 503)]:
            assert (await stack.enter_async_context(watching(app, headers=by(name)))).status == status


async def test_without_places_for_viewers_there_is_no_feed() -> None:
    async with front(DONE, router={"viewers": 0}) as (app, _):
        for call in (await once(app), await Call(app, path=EVENTS, method="GET").done()):
            assert (call.status, call.error["code"]) == (404, "events_off")


async def test_viewers_take_no_places_of_requests_and_see_a_full_router() -> None:
    async with front(DONE, router={"max_in_flight": 1}) as (app, _), contextlib.AsyncExitStack() as stack:
        for _ in range(5):
            await stack.enter_async_context(watching(app))
        assert (await Call(app, body()).done()).status == 200
        held = Call(app, body(), unfinished=True)
        await until(lambda: app._open == 6, "a request takes the place")
        assert (await Call(app, body()).done()).error["code"] == "overloaded"
        async with watching(app) as late:
            assert late.status == 200
        held.disconnect()
        await held.done()


async def serialised(monkeypatch: pytest.MonkeyPatch, viewers: int) -> int:
    """How often something is made JSON for so many viewers, in five busy seconds."""
    count = 0
    dumps = events.orjson.dumps

    def counting(data: Any) -> bytes:
        nonlocal count
        count += 1
        return dumps(data)

    async with front(DONE) as (app, _), contextlib.AsyncExitStack() as stack:
        pacer = Pacer(app)
        with monkeypatch.context() as patch:
            patch.setattr(events.orjson, "dumps", counting)
            watched = [await stack.enter_async_context(watching(app)) for _ in range(viewers)]
            for _ in range(10):
                app._traffic.take(record(pacer.now))
                await pacer.beat()
        assert len({viewer.body for viewer in watched}) == 1
    return count


async def test_fifty_viewers_share_what_is_made_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    one = await serialised(monkeypatch, 1)
    assert one > 10
    assert await serialised(monkeypatch, 50) == one


async def test_a_viewer_that_takes_nothing_is_let_go_and_no_other_one_waits_for_it() -> None:
    async with front(DONE) as (app, _):
        pacer = Pacer(app)
        reads, sent = asyncio.Event(), bytearray()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await reads.wait()
                sent.extend(message["body"])

        async def receive() -> Any:
            await asyncio.Event().wait()

        scope = {
            "type": "http",
            "method": "GET",
            "path": EVENTS,
            "query_string": b"",
            "headers": [],
            "root_path": "",
            "http_version": "1.1",
            "scheme": "http",
            "server": ("127.0.0.1", 8000),
        }
        slow = asyncio.ensure_future(app(scope, receive, send))
        await until(lambda: app._feed.viewers == 1)
        async with watching(app) as viewer:
            for number in range(100):
                app._traffic.take(record(pacer.now, request=number))
                await pacer.beat()
            assert sum(len(event["requests"]) for event in of(viewer, "requests")) == 100
        reads.set()
        async with asyncio.timeout(PATIENCE_S):
            await slow
        assert sent.endswith(b"event: bye\ndata: {}\n\n")
        assert sent.count(b"event: requests") == 1


# Coming and going of the app


async def test_a_new_configuration_says_bye_and_keeps_what_was_seen() -> None:
    limits: dict[str, Any] = {"router": {"hold_s": 7}}
    async with Upstream(DONE) as upstream:
        set_replicas("Hot", [Replica("hot-0", {HOT: upstream.url}, SECRET, {HOT: PublishedModel("awake")}, True)])
        live = LiveApp(
            lambda before: RouterApp(settings(**limits), {HOT: "Hot"}, Pool(), "test", name="r1", before=before)
        )
        live._loop = asyncio.get_running_loop()
        await live._app.start()
        try:
            async with watching(live) as viewer:
                await Call(live, body()).done()
                limits["router"] = {"hold_s": 8}
                await live.exchange()
                await viewer.done()
                assert told(viewer)[-1] == ("bye", {})
            async with watching(live) as again:
                assert of(again, "hello")[0]["router"] == "r1"
                assert of(again, "hello")[0]["policy"] != of(viewer, "hello")[0]["policy"]
                assert len(of(again, "requests")[0]["requests"]) == 1
                assert sum(point["requests"] for point in of(again, "traffic")[0]["points"]) == 1
        finally:
            await live._app.close()
            set_replicas("Hot", [])


async def test_a_front_door_that_closes_waits_for_no_viewer() -> None:
    began = time.monotonic()
    async with contextlib.AsyncExitStack() as client:
        async with front_doors(DONE, router={"drain_s": 60}) as ((door,), _):
            connection = await client.enter_async_context(connected(door))
            await connection.send(request(b"", target=EVENTS, method="GET"))
            await connection.reader.readuntil(b"event: requests\n")
        assert b"event: bye" in await connection.reader.read()
    assert time.monotonic() - began < 30
