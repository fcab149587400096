"""Requests that find every place taken, as their clients see it: they wait, in order, for so long, or are refused."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
import pytest
from asgi_call import Call
from front import HOT, Places, body, by, front, key, until
from scripted_upstream import DONE, Upstream, event
from scripted_upstream import stream as streamed

from serve_app.router.app import RouterApp
from serve_app.router.generate import PRIORITY

QUEUE = {"size": 50, "wait_s": 30}


async def waiting(app: RouterApp, count: int) -> None:
    await until(lambda: len(app._lines[HOT]) == count, f"{count} wait")


def names(upstream: Upstream) -> list[str]:
    """The texts of the requests that reached the engine, each once, in the order of the last try."""
    return list(dict.fromkeys(seen.body["messages"][0]["content"] for seen in reversed(upstream.seen)))[::-1]


async def test_burst_that_fits_waits_and_is_all_served() -> None:
    engine = Places(4, opened=True)
    async with front(engine, model={"queue": QUEUE}) as (app, _):
        calls = [Call(app, body(stream=False)) for _ in range(50)]
        assert [(await call.done()).status for call in calls] == [200] * 50
        assert engine.most == 4
        assert app._relay.in_flight.total() == 0


async def test_requests_that_wait_do_not_send_each_other_to_a_full_engine() -> None:
    engine = Places(1)
    async with front(engine, model={"queue": QUEUE}) as (app, _):
        calls = [Call(app, body()) for _ in range(10)]
        await until(lambda: engine.tries >= 5)
        began, before = time.monotonic(), engine.tries
        await until(lambda: time.monotonic() - began >= 0.5)
        # It is polled 20 times a second for places that other Routers freed.
        assert engine.tries - before <= 13
        engine.end(10)
        assert [(await call.done()).status for call in calls] == [200] * 10


async def test_full_queue_refuses_within_50_ms_and_says_when_to_come_back() -> None:
    engine = Places(1)
    async with front(engine, model={"queue": {"size": 1}}) as (app, _):
        calls = [Call(app, body())]
        await until(lambda: engine.taken == 1)
        calls.append(Call(app, body()))
        await waiting(app, 1)
        for streaming in (False, True):
            began = time.monotonic()
            call = await Call(app, body(stream=streaming)).done()
            assert time.monotonic() - began < 0.05
            assert (call.status, call.error["code"]) == (503, "overloaded")
            assert int(call.headers["retry-after"]) >= 1
        engine.end(2)
        assert [(await call.done()).status for call in calls] == [200, 200]


async def test_retry_after_grows_with_what_waits_and_with_how_long_answers_take() -> None:
    engine = Places(1)
    async with front(engine, model={"queue": {"size": 4}}) as (app, _):
        calls = [Call(app, body())]
        await until(lambda: engine.taken == 1)
        calls += [Call(app, body()) for _ in range(4)]
        await waiting(app, 4)
        refused = await Call(app, body()).done()
        assert int(refused.headers["retry-after"]) == 5  # four before it, at the first guess of a second each
        engine.end(5)
        for call in calls:
            await call.done()


async def test_request_that_waited_too_long_is_refused_with_503() -> None:
    engine = Places(1)
    async with front(engine, model={"queue": {"size": 5, "wait_s": 0.1}}) as (app, _):
        first = Call(app, body())
        await until(lambda: engine.taken == 1)
        call = await Call(app, body()).done()
        assert (call.status, call.error["code"]) == (503, "overloaded")
        assert "0.1 s" in call.error["message"]
        engine.end()
        assert (await first.done()).status == 200


COMMENTED = {"router": {"comment_s": 0.02}}
PIECES = [orjson.loads(event(text).removeprefix(b"data: ")) for text in "ab"]


def waits(place: int) -> bytes:
    return b": waits for hot, place %d\n\n" % place


async def test_stream_that_waits_hears_its_place_and_then_its_answer_whole() -> None:
    engine = Places(1, says=streamed(event("a"), event("b"), DONE))
    async with front(engine, model={"queue": QUEUE}, **COMMENTED) as (app, _):
        calls = [Call(app, body(stream=True))]
        await until(lambda: engine.taken == 1)
        for place in (1, 2):
            calls.append(Call(app, body(stream=True)))
            await calls[place].until(lambda call, place=place: call.body.count(waits(place)) > 1)
        engine.end(3)
        for call in calls:
            assert (await call.done()).events == [*(orjson.dumps(piece) for piece in PIECES), b"[DONE]"]
        assert waits(1) not in calls[0].body


async def test_who_does_not_stream_hears_nothing_until_its_answer() -> None:
    engine = Places(1)
    async with front(engine, model={"queue": {"size": 5, "wait_s": 0.15}}, **COMMENTED) as (app, _):
        first = Call(app, body())
        await until(lambda: engine.taken == 1)
        call = await Call(app, body()).done()
        assert (call.status, call.error["code"]) == (503, "overloaded")
        engine.end()
        assert (await first.done()).status == 200


async def test_refusal_after_such_comments_is_an_error_event_and_done() -> None:
    engine = Places(1)
    async with front(engine, model={"queue": {"size": 5, "wait_s": 0.15}}, **COMMENTED) as (app, _):
        first = Call(app, body())
        await until(lambda: engine.taken == 1)
        call = await Call(app, body(stream=True)).done()
        assert call.body.startswith(waits(1))
        error, done = call.events
        assert (orjson.loads(error)["error"]["code"], done) == ("overloaded", b"[DONE]")
        engine.end()
        assert (await first.done()).status == 200


async def test_stream_that_leaves_the_queue_after_comments_frees_its_place_there() -> None:
    engine = Places(1)
    async with front(engine, model={"queue": QUEUE}, **COMMENTED) as (app, _):
        first = Call(app, body())
        await until(lambda: engine.taken == 1)
        leaver = Call(app, body(stream=True))
        await leaver.until(lambda call: waits(1) in call.body)
        leaver.disconnect()
        await leaver.done()
        assert len(app._lines[HOT]) == 0
        engine.end()
        assert (await first.done()).status == 200


@pytest.mark.case(22)
async def test_client_that_leaves_the_queue_frees_its_place_there() -> None:
    engine = Places(1)
    async with front(engine, model={"queue": {"size": 1}}) as (app, _):
        first = Call(app, body())
        await until(lambda: engine.taken == 1)
        leaver = Call(app, body("leaver"))
        await waiting(app, 1)
        leaver.disconnect()
        assert (await leaver.done()).messages == []
        assert len(app._lines[HOT]) == 0
        last = Call(app, body())
        await waiting(app, 1)
        engine.end(2)
        assert [(await call.done()).status for call in (first, last)] == [200, 200]


async def test_client_that_leaves_while_it_is_answered_frees_its_place_for_who_waits() -> None:
    engine = Places(1)
    async with front(engine, model={"queue": QUEUE}) as (app, (upstream,)):
        leaver = Call(app, body())
        await until(lambda: engine.taken == 1)
        call = Call(app, body())
        await waiting(app, 1)
        leaver.disconnect()
        await leaver.done()
        await until(lambda: upstream.seen[0].closed.is_set())
        engine.end()
        assert (await call.done()).status == 200


KEYS = [key("gold", max_priority=10), key("plain"), key("low", max_priority=-5), key("flood")]


async def order_of(asked: list[tuple[str, str, Any]]) -> list[str]:
    """The order in which requests (text, key, priority) reach an engine with one place, that all wait for."""
    engine = Places(1)
    async with front(engine, model={"queue": QUEUE}, security={"keys": KEYS}) as (app, (upstream,)):
        calls = [Call(app, body("first"), headers=by("plain"))]
        await until(lambda: engine.taken == 1)
        for number, (text, name, priority) in enumerate(asked, 1):
            calls.append(Call(app, body(text, priority=priority), headers=by(name)))
            await until(lambda number=number: len(app._lines[HOT]) + engine.tries > number)
        await until(lambda: engine.tries >= 2)
        await waiting(app, len(asked))
        for _ in calls:
            engine.end()
            done = [call for call in calls if call._task.done()]
            await until(lambda done=done: len([call for call in calls if call._task.done()]) > len(done))
        assert {call.status for call in calls} == {200}
        return names(upstream)[1:]


async def test_higher_priority_goes_in_first() -> None:
    asked = [("a", "gold", 0), ("b", "gold", 5), ("c", "gold", -1), ("d", "gold", 9)]
    assert await order_of(asked) == ["d", "b", "a", "c"]


async def test_priority_is_capped_by_the_key() -> None:
    asked = [("a", "plain", 100), ("b", "low", 100), ("c", "low", None), ("d", "gold", 1)]
    # gold's 1 before plain's 0 (it asked for 100), and low is at -5 whether it asks or not.
    assert (await order_of(asked))[:2] == ["d", "a"]


async def test_key_with_a_negative_priority_gets_it_when_it_says_null_too() -> None:
    assert await order_of([("a", "low", None), ("b", "plain", 0)]) == ["b", "a"]


async def test_flood_of_one_key_delays_another_by_one_request() -> None:
    flood = [(f"f{number}", "flood", 0) for number in range(12)]
    order = await order_of([*flood, ("small", "gold", 0)])
    assert order.index("small") <= 1


@pytest.mark.parametrize("odd", ["high", 1.5, True, [1], {"a": 1}, 1e300, "5"])
async def test_odd_priority_is_a_400(odd: object) -> None:
    async with front(Places(1, opened=True)) as (app, _):
        call = await Call(app, body(priority=odd)).done()
        assert (call.status, call.error["param"]) == (400, "priority")


async def test_priority_does_not_reach_the_engine() -> None:
    async with front(Places(1, opened=True)) as (app, (upstream,)):
        assert (await Call(app, body(priority=-3)).done()).status == 200
        assert "priority" not in upstream.seen[0].body


async def test_line_of_a_batch_has_the_priority_of_its_batch_whatever_its_body_says() -> None:
    engine = Places(1)
    async with front(engine, model={"queue": QUEUE}, security={"keys": KEYS}) as (app, (upstream,)):

        async def batch(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, PRIORITY: -100}, receive, send)

        first = Call(app, body("first"), headers=by("gold"))
        await until(lambda: engine.taken == 1)
        line = Call(batch, body("batch", priority=10), headers=by("gold"))
        await waiting(app, 1)
        online = Call(app, body("online", priority=-1), headers=by("plain"))
        await waiting(app, 2)
        engine.end(3)
        assert [(await call.done()).status for call in (first, line, online)] == [200] * 3
        assert names(upstream) == ["first", "online", "batch"]


async def test_more_important_request_displaces_one_that_waits_and_that_one_hears_it_at_once() -> None:
    engine = Places(1)
    async with front(engine, model={"queue": {"size": 1}}, security={"keys": KEYS}) as (app, _):
        first = Call(app, body(), headers=by("plain"))
        await until(lambda: engine.taken == 1)
        loser = Call(app, body(), headers=by("plain"))
        await waiting(app, 1)
        winner = Call(app, body(priority=10), headers=by("gold"))
        assert ((await loser.done()).status, loser.error["code"]) == (503, "overloaded")
        engine.end(2)
        assert [(await call.done()).status for call in (first, winner)] == [200, 200]


async def test_place_that_frees_between_two_routers_is_found_without_being_told() -> None:
    """Another Router held the place: nobody tells this one that it is free."""
    engine = Places(1)
    engine.taken = 1
    async with front(engine, model={"queue": QUEUE}) as (app, _):
        call = Call(app, body())
        await waiting(app, 1)
        engine.taken = 0
        engine.end()
        assert (await asyncio.wait_for(call.done(), 2)).status == 200
