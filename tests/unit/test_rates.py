"""Rates of keys: exact over a sliding minute, in one Router and over several that share a Redis."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from asgi_call import Call
from front import Places, audited, body, by, front, key, until
from hypothesis import given
from hypothesis import strategies as st
from redis_server import RedisServer, redis_server
from scripted_upstream import DONE, answer, event, hang_up, silent, stream

from serve_app.admission.rates import WINDOW_S, Sliding
from serve_app.errors import ApiError
from serve_app.router.auth import Caller
from serve_app.router.rates import Rates
from serve_app.router.tally import Tally
from serve_app.service_schema import Anonymous
from serve_app.telemetry.audit import read_records

# One limit, in simulated time


@given(
    limit=st.integers(1, 20),
    requests=st.lists(st.tuples(st.integers(0, 240), st.integers(0, 25)), max_size=40),
)
def test_sliding_minute_lets_in_exactly_what_a_count_of_the_last_minute_would(
    limit: int, requests: list[tuple[int, int]]
) -> None:
    sliding = Sliding(limit)
    let_in: list[tuple[float, int]] = []
    now = 0.0
    for quarters, amount in requests:
        now += quarters / 4
        used = sum(each for came, each in let_in if came > now - WINDOW_S)
        room = sliding.take(amount, now)
        assert room.fits == (used + amount <= limit or used == 0)
        if room.fits:
            let_in.append((now, amount))
            used += amount
        assert room.remaining == max(0, limit - used)
        assert 0 <= room.reset_s <= WINDOW_S


@given(
    limit=st.integers(1, 20),
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 25), st.integers(0, 25)), max_size=30),
)
def test_waiting_as_long_as_it_says_is_enough_and_a_moment_less_is_not(
    limit: int, requests: list[tuple[int, int, int]]
) -> None:
    sliding = Sliding(limit)
    now = 0.0
    for quarters, amount, actual in requests:
        now += quarters / 4
        room = sliding.take(amount, now)
        if room.fits:
            sliding.settle(now, amount, actual)
            continue
        assert not sliding.take(amount, now + room.retry_after_s - 0.25).fits or room.retry_after_s <= 0.25
        now += room.retry_after_s
        assert sliding.take(amount, now).fits


def test_guess_is_replaced_by_what_it_was() -> None:
    sliding = Sliding(100)
    sliding.take(80, 0.0)
    assert sliding.take(50, 1.0).retry_after_s == 59
    sliding.settle(0.0, 80, 10)
    assert sliding.take(50, 1.0).remaining == 40


def test_answer_that_was_longer_than_guessed_is_paid_for() -> None:
    sliding = Sliding(100)
    sliding.take(10, 0.0)
    sliding.settle(0.0, 10, 150)
    assert sliding.room(1.0).remaining == 0
    assert sliding.take(1, 1.0).retry_after_s == 59


def test_what_is_larger_than_the_limit_is_let_in_alone() -> None:
    sliding = Sliding(100)
    assert sliding.take(500, 0.0).fits
    assert sliding.take(1, 1.0).retry_after_s == 59
    assert sliding.take(500, 60.0).fits


def test_what_is_larger_than_the_limit_is_let_in_after_requests_that_cost_nothing() -> None:
    sliding = Sliding(100)
    sliding.take(30, 0.0)
    sliding.settle(0.0, 30, 0)  # refused by the router, say
    assert sliding.take(500, 1.0).fits


# Callers, in one Router and over Redis


def caller(name: str = "k", **limits: int) -> Caller:
    return Caller(name, Anonymous(**limits))


@pytest.fixture(scope="module")
def _server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def server(_server: RedisServer) -> RedisServer:
    if not _server.running:
        _server.start()
    _server.client().flushall()
    return _server


@pytest.fixture(params=["own", "shared"])
async def rates(request: pytest.FixtureRequest, server: RedisServer) -> AsyncIterator[Rates]:
    found = Rates(server.url if request.param == "shared" else "")
    yield found
    await found.close()


async def refused(rates: Rates, who: Caller, tokens: int = 1) -> tuple[ApiError, dict[str, str]]:
    out: dict[str, str] = {}
    with pytest.raises(ApiError) as error:
        await rates.take(who, tokens, out)
    assert (error.value.status, error.value.code) == (429, "rate_limit_exceeded")
    return error.value, out


async def test_headers_say_what_is_left_as_openai_does(rates: Rates) -> None:
    out: dict[str, str] = {}
    await rates.take(caller(requests_per_minute=3, tokens_per_minute=100), 40, out)
    assert out["x-ratelimit-limit-requests"] == "3"
    assert out["x-ratelimit-remaining-requests"] == "2"
    assert out["x-ratelimit-limit-tokens"] == "100"
    assert out["x-ratelimit-remaining-tokens"] == "60"
    assert 59 < float(out["x-ratelimit-reset-tokens"].removesuffix("s")) <= 60


async def test_caller_without_limits_costs_nothing_and_hears_nothing(rates: Rates) -> None:
    out: dict[str, str] = {}
    assert await rates.take(caller(), 40, out) is None
    assert out == {}


async def test_used_up_rate_is_a_429_that_says_when(rates: Rates) -> None:
    who = caller(requests_per_minute=2)
    for _ in range(2):
        await rates.take(who, 0, {})
    error, out = await refused(rates, who, 0)
    assert 58 < (error.retry_after_s or 0) <= 60
    assert out["x-ratelimit-remaining-requests"] == "0"


async def test_callers_do_not_share_their_rates(rates: Rates) -> None:
    await rates.take(caller("a", requests_per_minute=1), 0, {})
    await rates.take(caller("b", requests_per_minute=1), 0, {})
    await refused(rates, caller("a", requests_per_minute=1), 0)


async def test_request_refused_for_its_tokens_does_not_count_as_one(rates: Rates) -> None:
    who = caller(requests_per_minute=2, tokens_per_minute=100)
    await rates.take(who, 90, {})
    for _ in range(3):
        _, out = await refused(rates, who, 50)
        assert out["x-ratelimit-remaining-requests"] == "1"
    await rates.take(who, 10, {})


async def test_refusal_by_both_limits_says_the_longer_wait(rates: Rates) -> None:
    who = caller(requests_per_minute=1, tokens_per_minute=100)
    await rates.take(who, 100, {})
    error, out = await refused(rates, who, 100)
    assert (error.retry_after_s or 0) > 58
    assert (out["x-ratelimit-remaining-requests"], out["x-ratelimit-remaining-tokens"]) == ("0", "0")


async def test_tokens_are_settled_when_they_are_known(rates: Rates) -> None:
    who = caller(tokens_per_minute=100)
    taken = await rates.take(who, 90, {})
    await refused(rates, who, 50)
    await rates.settle(who, taken, Tally(prompt=5, completion=5, first_at=1.0))
    out: dict[str, str] = {}
    await rates.take(who, 50, out)
    assert out["x-ratelimit-remaining-tokens"] == "40"


async def test_what_no_engine_answered_costs_no_tokens(rates: Rates) -> None:
    who = caller(tokens_per_minute=100)
    taken = await rates.take(who, 90, {})
    await rates.settle(who, taken, Tally())
    await rates.take(who, 500, {})
    await refused(rates, who, 1)


async def test_answer_that_was_cut_off_before_it_was_counted_costs_what_was_guessed(rates: Rates) -> None:
    who = caller(tokens_per_minute=100)
    taken = await rates.take(who, 90, {})
    await rates.settle(who, taken, Tally(first_at=1.0))
    await refused(rates, who, 50)


# Redis that goes and comes


async def test_two_routers_share_one_rate(server: RedisServer) -> None:
    one, other = Rates(server.url), Rates(server.url)
    who = caller(requests_per_minute=10)
    outs: list[dict[str, str]] = [{} for _ in range(10)]
    await asyncio.gather(*((one, other)[n % 2].take(who, 0, outs[n]) for n in range(10)))
    assert sorted(int(out["x-ratelimit-remaining-requests"]) for out in outs) == list(range(10))
    for rates in (one, other):
        await refused(rates, who, 0)
        await rates.close()


async def test_waiting_as_long_as_redis_says_is_enough(server: RedisServer) -> None:
    """The minute is moved into the past in Redis itself, rather than waited for."""
    rates, who = Rates(server.url), caller(tokens_per_minute=100)
    for tokens, age_s in ((60, 50), (30, 30)):
        await rates.take(who, tokens, {})
        for name in server.client().keys("*tokens*"):
            for member, score in server.client().zrange(name, 0, -1, withscores=True):
                if member.endswith(b":%d" % tokens):
                    server.client().zadd(name, {member: score - age_s})
    error, _ = await refused(rates, who, 50)
    assert 9 < (error.retry_after_s or 0) <= 10
    error, _ = await refused(rates, who, 80)
    assert 29 < (error.retry_after_s or 0) <= 30
    await rates.close()


async def taken_within(rates: Rates, who: Caller, seconds: float) -> dict[str, str]:
    out: dict[str, str] = {}
    began = time.monotonic()
    await rates.take(who, 1, out)
    assert time.monotonic() - began < seconds
    return out


async def test_without_redis_each_router_counts_alone_says_so_and_nobody_waits_long(server: RedisServer) -> None:
    rates, who = Rates(server.url), caller(requests_per_minute=1000)
    assert "x-router-rates" not in await taken_within(rates, who, 1)
    server.kill()
    began = time.monotonic()
    outs = [await taken_within(rates, who, 0.6) for _ in range(50)]
    assert time.monotonic() - began < 1.0
    assert all("away" in out["x-router-rates"] for out in outs)
    assert outs[-1]["x-ratelimit-remaining-requests"] == "950"
    server.start()
    await until(lambda: time.monotonic() >= rates._redis_again_at)
    out = await taken_within(rates, who, 1)
    assert "x-router-rates" not in out
    assert out["x-ratelimit-remaining-requests"] == "999"
    await rates.close()


async def test_redis_that_hangs_holds_up_a_few_requests_for_a_moment_only(server: RedisServer) -> None:
    rates, who = Rates(server.url), caller(requests_per_minute=1000, tokens_per_minute=10**6)
    taken = await rates.take(who, 5, {})
    os.kill(server.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        await asyncio.gather(*(taken_within(rates, who, 0.8) for _ in range(20)))
        await rates.settle(who, taken, Tally(prompt=1, first_at=1.0))
        assert time.monotonic() - began < 1.2
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await rates.close()


async def test_own_count_still_refuses_while_redis_is_away(server: RedisServer) -> None:
    rates, who = Rates(server.url), caller(requests_per_minute=3)
    server.kill()
    for _ in range(3):
        await taken_within(rates, who, 0.6)
    await refused(rates, who, 0)
    await rates.close()


# Through the router


def limited(**limits: Any) -> dict[str, Any]:
    return {"security": {"keys": [key("k", **limits)]}}


OK = answer(200, {"id": "x", "choices": [], "usage": {"prompt_tokens": 6, "completion_tokens": 4}})


async def test_429_comes_before_any_engine_and_says_whole_seconds() -> None:
    async with front(OK, **limited(requests_per_minute=1)) as (app, (upstream,)):
        first = await Call(app, body(), headers=by("k")).done()
        assert (first.status, first.headers["x-ratelimit-remaining-requests"]) == (200, "0")
        second = await Call(app, body(stream=True), headers=by("k")).done()
        assert (second.status, second.error["code"]) == (429, "rate_limit_exceeded")
        assert 58 < int(second.headers["retry-after"]) <= 60
        assert math.ceil(float(second.headers["x-ratelimit-reset-requests"].removesuffix("s"))) == int(
            second.headers["retry-after"]
        )
        assert len(upstream.seen) == 1


async def test_answer_is_booked_with_the_tokens_that_the_engine_counted() -> None:
    async with front(OK, **limited(tokens_per_minute=1000)) as (app, _):
        await Call(app, body(max_tokens=900), headers=by("k")).done()
        call = await Call(app, body(max_tokens=1), headers=by("k")).done()
        assert call.status == 200
        assert int(call.headers["x-ratelimit-remaining-tokens"]) > 950


async def test_many_choices_cost_as_many_answers_before_they_are_counted() -> None:
    places = Places(8)
    async with front(places, **limited(tokens_per_minute=1000)) as (app, _):
        asked = Call(app, body(max_tokens=100, n=9), headers=by("k"))
        await until(lambda: places.taken)
        beside = await Call(app, body(max_tokens=100), headers=by("k")).done()
        assert (beside.status, beside.error["code"]) == (429, "rate_limit_exceeded")
        places.end()
        assert (await asked.done()).status == 200


COUNTED = {
    "/tokenize": ({"prompt": "a b c"}, {"count": 3, "max_model_len": 64, "tokens": [1, 2, 3], "token_strs": None}, 3),
    "/detokenize": ({"tokens": [1, 2, 3, 4]}, {"prompt": '{"count":9,"max_model_len":'}, 4),
    "/v1/score": (
        {"text_1": "a", "text_2": ["b"]},
        {"data": [], "usage": {"prompt_tokens": 5, "total_tokens": 5, "completion_tokens": 0}},
        5,
    ),
    "/v1/rerank": (
        {"query": "a", "documents": ['"usage":{"prompt_tokens":9}']},
        {
            "usage": {"prompt_tokens": 6, "total_tokens": 6},
            "results": [{"document": {"text": '"usage":{"prompt_tokens":9}'}}],
        },
        6,
    ),
    "/v1/embeddings": ({"input": "a"}, {"data": [], "usage": {"prompt_tokens": 7, "total_tokens": 7}}, 7),
}


@pytest.mark.parametrize("path", COUNTED)
async def test_what_generates_nothing_is_booked_and_recorded_with_its_tokens(tmp_path: Path, path: str) -> None:
    fields, said, tokens = COUNTED[path]
    sections = limited(tokens_per_minute=1000, requests_per_minute=10) | audited(tmp_path)
    model = {"abilities": [{"/v1/score": "score", "/v1/rerank": "score"}.get(path, "embeddings")]}
    async with front(answer(200, said), model=model, **sections) as (app, _):
        for left in (9, 8):
            call = await Call(app, fields, path=path, headers=by("k")).done()
            assert (call.status, call.headers["x-ratelimit-remaining-requests"]) == (200, str(left))
        rates = app._rates._key("k", app._keys.named("k").limits)
        assert rates.tokens.room(time.monotonic()).remaining == 1000 - 2 * tokens
    records = list(read_records(tmp_path))
    assert [(one["path"], one["key"], one["status"], one["prompt_tokens"]) for one in records] == [
        (path, "k", 200, tokens)
    ] * 2
    assert {one["completion_tokens"] for one in records} == {0}


@pytest.mark.parametrize("path", COUNTED)
async def test_rates_refuse_what_generates_nothing_too(path: str) -> None:
    fields, said, _ = COUNTED[path]
    model = {"abilities": [{"/v1/score": "score", "/v1/rerank": "score"}.get(path, "embeddings")]}
    async with front(answer(200, said), model=model, **limited(requests_per_minute=1)) as (app, (upstream,)):
        for status in (200, 429):
            assert (await Call(app, fields, path=path, headers=by("k")).done()).status == status
        assert len(upstream.seen) == 1


async def test_deeply_nested_body_of_a_key_with_a_token_rate_is_answered_or_a_400() -> None:
    raw = b'{"messages":[{"role":"user","content":"hi"}],"vendor":' + b"[" * 900 + b"]" * 900 + b"}"
    async with front(OK, **limited(tokens_per_minute=1000)) as (app, _):
        assert (await Call(app, raw, headers=by("k")).done()).status in (200, 400)


@pytest.mark.parametrize("odd", ["many", -5, 1.5, None, True, [3], {"a": 1}])
async def test_odd_max_tokens_of_a_key_with_a_token_rate_is_no_fault_of_the_routers(odd: object) -> None:
    async with front(OK, **limited(tokens_per_minute=1000)) as (app, _):
        assert (await Call(app, body(max_tokens=odd), headers=by("k")).done()).status in (200, 400)


WORDS = stream(event("a"), event("b"), DONE)
ENDINGS = {
    "answered": (OK, {}),
    "streamed": (WORDS, {"stream": True}),
    "unknown model": (OK, {"model": "nope"}),
    "engine refuses": (answer(400, {"error": {"message": "no"}}), {}),
    "engine dies": (hang_up, {}),
    "stream breaks off": (stream(event("a"), end="cut"), {"stream": True}),
}


@pytest.mark.parametrize("ending", ENDINGS)
async def test_place_of_a_key_is_free_again_however_its_request_ends(ending: str) -> None:
    script, fields = ENDINGS[ending]
    async with front(script, **limited(max_concurrent=1)) as (app, (upstream,)):
        for _ in range(2):
            call = await Call(app, body(**fields), headers=by("k")).done()
            assert call.status != 429
        upstream.script = OK
        assert (await Call(app, body(), headers=by("k")).done()).status == 200


async def test_only_so_many_requests_of_a_key_run_at_once_and_a_leaver_makes_room() -> None:
    async with front(silent, security={"keys": [key("k", max_concurrent=1), key("other")]}) as (app, (upstream,)):
        first = Call(app, body(), headers=by("k"))
        await asyncio.wait_for(upstream.arrived.wait(), 5)
        second = await Call(app, body(), headers=by("k")).done()
        assert (second.status, second.error["code"]) == (429, "concurrency_limit_exceeded")
        assert second.headers["retry-after"] == "1"
        upstream.script = OK
        assert (await Call(app, body(), headers=by("other")).done()).status == 200
        first.disconnect()
        await first.done()
        assert (await Call(app, body(), headers=by("k")).done()).status == 200


async def test_request_that_is_refused_by_the_queue_leaves_no_place_taken() -> None:
    engine = Places(1)
    async with front(engine, model={"queue": {"size": 0}}, **limited(max_concurrent=2)) as (app, _):
        first = Call(app, body(), headers=by("k"))
        await until(lambda: engine.taken == 1)
        for _ in range(3):
            assert (await Call(app, body(), headers=by("k")).done()).status == 503
        engine.end()
        assert (await first.done()).status == 200
