"""Clients that leave, and models that are not awake when they are asked for."""

import asyncio
import time

import orjson
import pytest
from asgi_call import Call
from relayed import (
    COLD,
    EVENTS,
    WHOLE,
    behind,
    body,
    config,
    empty_tables,
    pool,
    publish,
    refuses,
    routed,
    through,
)
from scripted_pool import SECRET, Pool
from scripted_upstream import (
    Upstream,
    answer,
    error,
    silent,
    stream,
)

from serve_app.models.replicas import PublishedModel, Replica, set_replicas

__all__ = ["empty_tables", "pool", "through"]
GONE_WITHIN_S = 1.0


# Clients that leave


async def left_in_time(call: Call, upstream: Upstream) -> None:
    began = time.monotonic()
    call.disconnect()
    await asyncio.wait_for(upstream.seen[0].closed.wait(), GONE_WITHIN_S)
    await call.done()
    assert time.monotonic() - began < GONE_WITHIN_S


@pytest.mark.case(59, 107)
@pytest.mark.parametrize("streaming", [False, True])
async def test_client_that_leaves_before_the_answer_closes_the_engines_connection(streaming: bool) -> None:
    async with behind(silent) as (app, (upstream,)):
        call = Call(app, body(stream=streaming))
        await asyncio.wait_for(upstream.arrived.wait(), 5)
        await left_in_time(call, upstream)
        assert call.messages == []
        assert app._relay.in_flight.total() == 0


async def test_client_that_leaves_a_stream_closes_the_engines_connection() -> None:
    async with behind(stream(*EVENTS, end="stall")) as (app, (upstream,)):
        call = Call(app, body(stream=True))
        await call.until(lambda call: EVENTS[2] in call.body)
        await left_in_time(call, upstream)
        assert app._relay.in_flight.total() == 0


@pytest.mark.parametrize("streaming", [False, True])
async def test_client_that_leaves_while_it_is_held_is_let_go_and_the_load_goes_on(pool: Pool, streaming: bool) -> None:
    async with Upstream(answer(200, {"id": "ok"})) as upstream, routed(pool) as app:
        pool.will_be_at(upstream.url)
        call = Call(app, body(model=COLD, stream=streaming))
        await asyncio.wait_for(pool.called.wait(), 5)
        call.disconnect()
        await asyncio.wait_for(call.done(), GONE_WITHIN_S)
        assert upstream.seen == []
        pool.woken.set()
        assert (await Call(app, body(model=COLD)).done()).status == 200
        assert pool.asked == [COLD]


async def test_client_that_leaves_in_the_middle_of_its_body_is_let_go(pool: Pool) -> None:
    async with routed(pool) as app:
        call = Call(app, chunks=[b'{"mess'], unfinished=True)
        call.disconnect()
        assert (await call.done()).messages == []


# Cold models


@pytest.mark.case(122)
async def test_burst_on_a_cold_model_asks_for_one_load_and_all_are_answered(pool: Pool) -> None:
    async with Upstream(answer(200, {"id": "ok"})) as upstream, routed(pool) as app:
        pool.will_be_at(upstream.url)
        calls = [Call(app, body(model=COLD)) for _ in range(20)]
        await asyncio.wait_for(pool.called.wait(), 5)
        pool.woken.set()
        assert [(await call.done()).status for call in calls] == [200] * 20
        assert pool.asked == [COLD]
        assert "x-router-cold-start-ms" in calls[0].headers


@pytest.mark.case(37)
async def test_held_stream_hears_comments_and_then_its_answer(pool: Pool) -> None:
    async with Upstream(stream(WHOLE)) as upstream, routed(pool) as app:
        pool.will_be_at(upstream.url)
        call = Call(app, body(model=COLD, stream=True))
        await call.until(lambda call: call.body.count(b": loading") >= 2)
        pool.woken.set()
        await call.done()
        assert call.body.startswith(b": loading cold 0%\n\n")
        assert call.body.endswith(WHOLE)
        assert len(call.events) == 4


async def test_held_stream_hears_its_place_in_the_queue_for_memory_and_then_that_it_wakes(pool: Pool) -> None:
    async with Upstream(stream(WHOLE)) as upstream, routed(pool) as app:
        pool.will_be_at(upstream.url)
        publish(PublishedModel("asleep", place=2))
        call = Call(app, body(model=COLD, stream=True))
        await call.until(lambda call: b": cold waits for memory, place 2\n\n" in call.body)
        publish(PublishedModel("waking", progress=0.25))
        await call.until(lambda call: b": waking cold 25%\n\n" in call.body)
        pool.woken.set()
        await call.done()
        assert call.body.endswith(WHOLE)


@pytest.mark.case(91)
@pytest.mark.parametrize(
    ("limits", "retry_after"),
    [({"max_held_per_model": 2}, "30"), ({"max_held": 2}, "30"), ({"max_held": 2, "max_held_per_model": 5}, "30")],
)
async def test_only_so_many_requests_are_held_and_the_next_is_a_503_that_says_when_to_come_back(
    pool: Pool, limits: dict[str, int], retry_after: str
) -> None:
    async with Upstream(answer(200, {"id": "ok"})) as upstream, routed(pool, config(**limits)) as app:
        pool.will_be_at(upstream.url)
        held = [Call(app, body(model=COLD)) for _ in range(2)]
        await asyncio.wait_for(pool.called.wait(), 5)
        refused = [await Call(app, body(model=COLD, stream=stream)).done() for stream in (False, True)]
        for call in refused:
            assert (call.status, call.error["code"]) == (503, "too_many_waiting")
            assert call.headers["retry-after"] == retry_after
        pool.woken.set()
        assert [(await call.done()).status for call in held] == [200, 200]
        assert (await Call(app, body(model=COLD)).done()).status == 200


async def test_held_requests_for_one_model_leave_room_for_another_ones(pool: Pool) -> None:
    async with Upstream(answer(200, {"id": "ok"})) as upstream, routed(pool, config(max_held_per_model=1)) as app:
        pool.will_be_at(upstream.url)
        held = [Call(app, body(model=COLD)), Call(app, {"input": "x", "model": "embedder"}, path="/v1/embeddings")]
        await asyncio.wait_for(pool.called.wait(), 5)
        pool.woken.set()
        assert [(await call.done()).status for call in held] == [200, 200]


async def test_place_of_a_client_that_left_is_free_for_the_next_one(pool: Pool) -> None:
    async with Upstream(answer(200, {"id": "ok"})) as upstream, routed(pool, config(max_held=1)) as app:
        pool.will_be_at(upstream.url)
        leaver = Call(app, body(model=COLD))
        await asyncio.wait_for(pool.called.wait(), 5)
        leaver.disconnect()
        await leaver.done()
        call = Call(app, body(model=COLD))
        pool.woken.set()
        assert (await call.done()).status == 200


async def test_refusal_of_a_sleeping_model_says_to_come_back_when_it_will_be_awake(pool: Pool) -> None:
    async with routed(pool, config(max_held=1)) as app:
        publish(PublishedModel("asleep", expected_load_s=40, expected_wake_s=3))
        held = Call(app, body(model=COLD))
        await asyncio.wait_for(pool.called.wait(), 5)
        call = await Call(app, body(model=COLD)).done()
        assert (call.error["code"], call.headers["retry-after"]) == ("too_many_waiting", "3")
        held.disconnect()
        await held.done()


async def test_engines_refusal_after_comments_is_an_error_event_and_done(pool: Pool) -> None:
    async with Upstream(answer(400, error(400, "no"))) as upstream, routed(pool) as app:
        pool.will_be_at(upstream.url)
        call = Call(app, body(model=COLD, stream=True))
        await call.until(lambda call: b": loading" in call.body)
        pool.woken.set()
        await call.done()
        failure, done = call.events
        assert orjson.loads(failure)["error"]["message"] == "no"
        assert done == b"[DONE]"


@pytest.mark.case(38)
async def test_hold_has_an_end_with_retry_after_from_the_load_time(pool: Pool) -> None:
    async with routed(pool, config(hold_s=0)) as app:
        call = await Call(app, body(model=COLD)).done()
        assert (call.status, call.error["code"]) == (503, "model_loading")
        assert call.headers["retry-after"] == "30"


async def test_refused_load_is_a_503_with_its_reason(pool: Pool) -> None:
    pool.woken.set()
    pool.answers.append({"refused": {"code": "load_failed", "reason": "no weights", "retry_after_s": 20}})
    async with routed(pool) as app:
        call = await Call(app, body(model=COLD)).done()
        assert (call.status, call.error["code"], call.headers["retry-after"]) == (503, "load_failed", "20")
        assert "no weights" in call.error["message"]


async def test_pool_that_is_down_is_asked_again_while_somebody_waits(pool: Pool) -> None:
    pool.woken.set()
    pool.answers.append(RuntimeError("actor died"))
    async with Upstream(answer(200, {"id": "ok"})) as upstream, routed(pool) as app:
        pool.will_be_at(upstream.url)
        assert (await Call(app, body(model=COLD)).done()).status == 200
        assert pool.asked == [COLD, COLD]


async def test_model_that_went_to_sleep_is_woken_again(pool: Pool) -> None:
    pool.woken.set()
    async with (
        Upstream(refuses("closed")) as asleep,
        Upstream(answer(200, {"id": "ok"})) as awake,
        routed(pool) as app,
    ):
        pool.will_be_at(asleep.url)
        pool.will_be_at(awake.url)
        assert (await Call(app, body(model=COLD)).done()).status == 200
        assert pool.asked == [COLD, COLD]


async def test_model_that_always_closes_is_given_up_with_a_503(pool: Pool) -> None:
    pool.woken.set()
    async with Upstream(refuses("closed")) as upstream, routed(pool) as app:
        pool.will_be_at(upstream.url)
        call = await Call(app, body(model=COLD)).done()
        assert call.status == 503
        assert 1 < len(pool.asked) < 10


async def test_full_cold_model_is_not_loaded_again(pool: Pool) -> None:
    pool.woken.set()
    async with Upstream(refuses("full")) as upstream, routed(pool) as app:
        pool.will_be_at(upstream.url)
        call = await Call(app, body(model=COLD)).done()
        assert (call.status, call.error["code"], pool.asked) == (503, "overloaded", [COLD])


@pytest.mark.case(121)
async def test_full_lazy_replica_has_its_model_loaded_on_another_one(pool: Pool) -> None:
    pool.woken.set()
    async with Upstream(refuses("full")) as full, Upstream(answer(200, {"id": "ok"})) as other, routed(pool) as app:
        set_replicas("Pool", [lazy_replica("pool-0", full.url), Replica("pool-1", {}, SECRET, {}, True)])
        pool.will_be_at(other.url)
        call = await Call(app, body(model=COLD)).done()
        assert (call.status, call.error["code"]) == (503, "overloaded")
        await asyncio.wait_for(pool.called.wait(), 5)
        assert (pool.asked, pool.spread) == ([], [(COLD, ("pool-0",))])
        set_replicas("Pool", [lazy_replica("pool-0", full.url), lazy_replica("pool-1", other.url)])
        assert (await Call(app, body(model=COLD)).done()).status == 200


@pytest.mark.case(121)
async def test_burst_on_a_full_lazy_replica_spreads_its_model_once(pool: Pool) -> None:
    async with Upstream(refuses("full")) as full, routed(pool) as app:
        set_replicas("Pool", [lazy_replica("pool-0", full.url), Replica("pool-1", {}, SECRET, {}, True)])
        for _ in range(5):
            assert (await Call(app, body(model=COLD)).done()).status == 503
        assert (pool.asked, pool.spread) == ([], [(COLD, ("pool-0",))])


async def test_full_lazy_model_that_no_other_replica_could_hold_is_not_spread(pool: Pool) -> None:
    async with Upstream(refuses("full")) as full, routed(pool) as app:
        set_replicas("Pool", [lazy_replica("pool-0", full.url)])
        for _ in range(2):
            assert (await Call(app, body(model=COLD)).done()).error["code"] == "overloaded"
        assert (pool.asked, pool.spread) == ([], [])


def lazy_replica(name: str, url: str) -> Replica:
    """A replica of the pool that has the cold model awake."""
    return Replica(name, {COLD: url}, SECRET, {COLD: PublishedModel("awake")}, True)
