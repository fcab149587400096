"""The router in front of scripted engines: every byte and every fault as a client sees them."""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import orjson
import pytest
from asgi_call import Call
from scripted_pool import SECRET, Pool
from scripted_upstream import (
    DONE,
    Script,
    Upstream,
    answer,
    error,
    event,
    hang_up,
    silent,
    stream,
)

from serve_app.config import Config
from serve_app.models.replicas import PublishedModel, Replica, set_replicas
from serve_app.router.app import RouterApp

HOT, COLD = "org/hot:1b", "cold"
PROMPT = "my-private-words"
GONE_WITHIN_S = 1.0


def config(**router: Any) -> Config:
    models = [
        {"id": HOT, "aliases": ["nick"], "tier": "resident", "source": "org/hot", "context": 4096},
        {"id": COLD, "tier": "lazy", "source": "org/cold", "context": 2048, "expected_load_s": 30},
        {"id": "embedder", "tier": "lazy", "source": "org/e", "context": 512, "abilities": ["embeddings"]},
    ]
    for model in models:
        model.setdefault("queue", {"size": 0})
    return Config.model_validate({"models": models, "router": {"loading_comment_s": 0.01, **router}})


@pytest.fixture(autouse=True, params=["asgi", "door"])
def through(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Call, "through", request.param)


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture(autouse=True)
def empty_tables() -> Iterator[None]:
    yield
    for deployment in ("Hot", "Pool"):
        set_replicas(deployment, [])


@contextlib.asynccontextmanager
async def routed(pool: Pool, settings: Config | None = None) -> AsyncIterator[RouterApp]:
    set_replicas("Pool", [Replica("pool-0", {}, SECRET, {}, True)])
    app = RouterApp(settings or config(), {HOT: "Hot", COLD: "Pool", "embedder": "Pool"}, pool, "test")
    yield app
    await app._relay.close()


def hot_replicas(*upstreams: Upstream) -> None:
    set_replicas(
        "Hot",
        [
            Replica(f"hot-{i}", {HOT: upstream.url}, SECRET, {HOT: PublishedModel("awake")}, True)
            for i, upstream in enumerate(upstreams)
        ],
    )


@contextlib.asynccontextmanager
async def behind(*scripts: Script, settings: Config | None = None) -> AsyncIterator[tuple[RouterApp, list[Upstream]]]:
    """A router, and one replica of the hot model for each script."""
    async with contextlib.AsyncExitStack() as stack:
        upstreams = [await stack.enter_async_context(Upstream(script)) for script in scripts]
        hot_replicas(*upstreams)
        yield await stack.enter_async_context(routed(Pool(), settings)), upstreams


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": PROMPT}], **fields}


async def asked(script: Script, **fields: Any) -> Call:
    """The whole exchange with one engine that follows the script."""
    async with behind(script) as (app, _):
        call = await Call(app, body(**fields)).done()
    if call.status != 200:
        assert PROMPT not in str(call.json)
        assert call.error
    return call


# Streams


TEXT = "héllo 世界 🚀 done"
EVENTS = [event(word) for word in (TEXT, "second", "third")]
WHOLE = b"".join(EVENTS) + DONE


@pytest.mark.case(56)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
async def test_stream_cut_anywhere_arrives_byte_for_byte(size: int) -> None:
    pieces = [WHOLE[start : start + size] for start in range(0, len(WHOLE), size)]
    call = await asked(stream(*pieces), stream=True)
    assert (call.status, call.body) == (200, WHOLE)
    assert call.headers["content-type"].startswith("text/event-stream")


async def test_first_event_is_passed_on_before_the_second_exists() -> None:
    async with behind(stream(EVENTS[0], end="stall")) as (app, _):
        call = Call(app, body(stream=True))
        await call.until(lambda call: call.body == EVENTS[0])
        call.disconnect()
        await call.done()


FIRST_ERROR = b"data: " + orjson.dumps(error(400, "too long for max_model_len")) + b"\n\n"
# As json.dumps writes it.
SPACED_ERROR = b'data: {"error": {"message": "bad", "type": "BadRequestError", "param": null, "code": 400}}\n\n'


@pytest.mark.case(5, 19)
@pytest.mark.parametrize("first", [FIRST_ERROR, SPACED_ERROR])
@pytest.mark.parametrize("size", [4, 12, 30, 10_000])
async def test_error_in_the_first_event_becomes_a_status_however_it_is_cut(first: bytes, size: int) -> None:
    whole = first + DONE
    pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
    call = await asked(stream(*pieces), stream=True)
    assert call.status == 400
    assert call.error["type"] == "invalid_request_error"


async def test_engines_fault_in_the_first_event_becomes_a_503() -> None:
    first = b"data: " + orjson.dumps(error(500, "EngineDeadError")) + b"\n\n"
    call = await asked(stream(first, DONE), stream=True)
    assert (call.status, call.error["code"]) == (503, "engine_error")
    assert "retry-after" in call.headers


@pytest.mark.case(19)
@pytest.mark.parametrize("pieces", [(), (DONE,), (DONE[:5], DONE[5:])])
async def test_stream_without_an_event_is_an_error_and_never_an_empty_success(
    pieces: tuple[bytes, ...],
) -> None:
    call = await asked(stream(*pieces), stream=True)
    assert (call.status, call.error["code"]) == (503, "engine_died")


@pytest.mark.case(58)
@pytest.mark.parametrize("keep", range(0, len(EVENTS[1]), 9))
async def test_stream_that_is_cut_ends_in_an_error_event_and_done(keep: int) -> None:
    call = await asked(stream(EVENTS[0], EVENTS[1][:keep], end="cut"), stream=True)
    *passed, failure, done = call.events
    assert b"".join(b"data: " + data + b"\n\n" for data in passed) == EVENTS[0]
    assert orjson.loads(failure)["error"]["code"] == "engine_died"
    assert done == b"[DONE]"


async def test_stream_that_ends_without_done_is_an_error() -> None:
    call = await asked(stream(*EVENTS), stream=True)
    assert orjson.loads(call.events[-2])["error"]["code"] == "engine_died"


async def test_connection_cut_before_the_first_event_is_a_status() -> None:
    call = await asked(stream(end="cut"), stream=True)
    assert (call.status, call.error["code"]) == (503, "engine_died")


# Plain answers


async def test_plain_answer_arrives_byte_for_byte() -> None:
    call = await asked(answer(200, {"id": "x", "choices": []}, pieces=3))
    assert (call.status, call.json) == (200, {"id": "x", "choices": []})
    assert int(call.headers["content-length"]) == len(call.body)


@pytest.mark.parametrize("script", [hang_up, answer(200, {"id": "x" * 100}, pieces=4, cut=True)])
async def test_engine_that_dies_before_or_in_a_plain_answer_is_a_503(script: Script) -> None:
    call = await asked(script)
    assert (call.status, call.error["code"]) == (503, "engine_died")
    assert int(call.headers["retry-after"]) >= 1


@pytest.mark.case(5)
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("pieces", [1, 5])
async def test_engines_400_keeps_its_message_and_has_a_word_for_a_code(streaming: bool, pieces: int) -> None:
    refusal = error(400, "This model's maximum context length is 4096 tokens.", "messages")
    call = await asked(answer(400, refusal, pieces=pieces), stream=streaming)
    assert call.status == 400
    assert call.error == {
        "message": "This model's maximum context length is 4096 tokens.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }


@pytest.mark.case(4)
@pytest.mark.parametrize(
    "message",
    [
        f"[{{'type': 'bool_parsing', 'loc': ('body', 'echo'), 'msg': 'not a bool', 'input': '{PROMPT}'}}]",
        f"1 validation error: echo [type=bool_parsing, input_value='{PROMPT}', input_type=str]",
        f'{{"msg": "bad", "input": "{PROMPT}"}}',
        f"input={PROMPT}",
    ],
)
async def test_engines_400_does_not_echo_what_the_client_wrote(message: str) -> None:
    call = await asked(answer(400, error(400, message, PROMPT * 10)))
    assert (call.status, call.error["code"]) == (400, "invalid_value")


@pytest.mark.case(4)
@pytest.mark.parametrize(
    ("message", "param", "said"),
    [
        (
            "3 validation errors:\n  {'type': 'bool_parsing', 'loc': 'body.echo', 'msg': 'Not a valid boolean',",
            "echo",
            "`echo`: Not a valid boolean.",
        ),
        (
            "1 validation error:\n  {'type': 'literal_error', 'loc': 'body.response_format.type', "
            "'msg': \"Input should be 'text' or 'json_object'\"",
            "response_format",
            "`response_format`: Input should be 'text' or 'json_object'.",
        ),
        (
            f"1 validation error:\n  {{'type': 'float', 'loc': 'body.logit_bias.{PROMPT}', 'msg': 'Not a number'",
            "logit_bias",
            "`logit_bias`: Not a number.",
        ),
        (
            f"1 validation error:\n  {{'type': 'missing', 'loc': 'body.{PROMPT}.x', 'msg': 'Field required'",
            None,
            "The body is not what the endpoint takes: Field required.",
        ),
    ],
)
async def test_what_the_engines_validator_finds_is_said_in_a_sentence(
    message: str, param: str | None, said: str
) -> None:
    call = await asked(answer(400, error(400, message)))
    assert (call.error["param"], call.error["message"]) == (param, said)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ('[04:24:23] <path>:4944: Unsupported type "x"\n', 'Unsupported type "x"\n'),
        (f"top_p must be in (0, 1], got 7. (parameter=top_p, value={PROMPT})", "top_p must be in (0, 1], got 7."),
        ("`tools` must be set. (parameter=tool_choice)", "`tools` must be set."),
        (f"only one kind, but: {{'json': {{'{PROMPT}': 1}}, 'regex': 'a'}}", "only one kind, but"),
        ("Invalid structural tag specification.", "No grammar can be made of the schemas in `tools`."),
    ],
)
async def test_what_the_engine_says_beside_the_matter_is_left_out(message: str, said: str) -> None:
    call = await asked(answer(400, error(400, message)))
    assert call.error["message"] == said


@pytest.mark.parametrize(("status", "seen"), [(404, 404), (422, 400), (429, 429), (302, 503), (204, 503)])
async def test_engines_other_refusals_keep_their_meaning(status: int, seen: int) -> None:
    assert (await asked(answer(status, error(status, "no")))).status == seen


@pytest.mark.parametrize(
    "script",
    [answer(500, error(500, "CUDA error")), answer(502, b"<html>"), answer(500, [1]), answer(500, b"")],
)
async def test_engines_fault_is_a_503_without_its_inner_message(script: Script) -> None:
    call = await asked(script)
    assert (call.status, call.error["type"]) == (503, "server_error")
    assert "CUDA" not in call.error["message"]


@pytest.mark.parametrize("raw", [b"not json", b"[]", b'{"error": "text"}', b'{"detail": "x"}', b'{"error": null}'])
async def test_engines_400_in_another_shape_gets_ours(raw: bytes) -> None:
    assert (await asked(answer(400, raw))).status == 400


async def test_engine_that_dies_while_it_refuses_is_an_error_in_our_shape() -> None:
    call = await asked(answer(400, error(400, "x" * 100), pieces=3, cut=True))
    assert call.status in (400, 503)


# Replicas


def refuses(word: str) -> Script:
    return answer(503, {"error": {"message": "no"}}, refusal=word)


@pytest.mark.parametrize("word", ["full", "closed", "dead"])
async def test_refusing_replica_is_passed_over_for_another_one(word: str) -> None:
    async with behind(refuses(word), answer(200, {"id": "ok"})) as (app, upstreams):
        call = await Call(app, body()).done()
        assert (call.status, call.json) == (200, {"id": "ok"})
        assert [len(upstream.seen) for upstream in upstreams] == [1, 1]


async def test_all_replicas_full_is_a_503_with_retry_after_and_each_is_asked_once() -> None:
    async with behind(refuses("full"), refuses("full")) as (app, upstreams):
        call = await Call(app, body(stream=True)).done()
        assert (call.status, call.error["code"]) == (503, "overloaded")
        assert int(call.headers["retry-after"]) >= 1
        assert [len(upstream.seen) for upstream in upstreams] == [1, 1]


async def test_address_that_now_belongs_to_another_service_is_passed_over() -> None:
    async with behind(answer(403, error(403, "not yours")), answer(200, {"id": "ok"})) as (app, _):
        assert (await Call(app, body()).done()).status == 200


async def test_unreachable_replica_is_passed_over() -> None:
    async with behind(silent, answer(200, {"id": "ok"})) as (app, upstreams):
        await upstreams[0].__aexit__()
        assert (await Call(app, body()).done()).status == 200


async def test_no_replica_at_all_is_a_503_with_retry_after() -> None:
    async with behind() as (app, _):
        call = await Call(app, body()).done()
        assert (call.status, call.error["code"]) == (503, "model_starting")
        assert int(call.headers["retry-after"]) >= 1


@pytest.mark.case(121)
async def test_request_goes_to_the_replica_with_fewer_in_flight() -> None:
    async with behind(silent, silent) as (app, upstreams):
        calls = [Call(app, body()) for _ in range(2)]
        for upstream in upstreams:
            await asyncio.wait_for(upstream.arrived.wait(), 5)
        assert [len(upstream.seen) for upstream in upstreams] == [1, 1]
        for call in calls:
            call.disconnect()
            await call.done()


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


def publish(*cold: PublishedModel) -> None:
    """The cold model as each replica of the pool publishes it."""
    set_replicas("Pool", [Replica(f"pool-{i}", {}, SECRET, {COLD: found}, True) for i, found in enumerate(cold)])


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


# What goes on to the engine


@pytest.mark.case(118)
async def test_engine_sees_the_clients_fields_and_none_of_its_credentials() -> None:
    private = {
        "authorization": "Bearer key",
        "cookie": "session=1",
        "x-forwarded-for": "1.2.3.4",
        "x-switchyard-secret": "guess",
        "x-api-key": "key",
        "user-agent": "client",
    }
    kept = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tracestate": "a=b"}
    async with behind(answer(200, {})) as (app, (upstream,)):
        await Call(app, body(vendor=[1, None]), headers={**private, **kept}).done()
    (seen,) = upstream.seen
    assert (seen.path, seen.body["vendor"], seen.body["model"]) == ("/v1/chat/completions", [1, None], HOT)
    assert seen.headers["x-switchyard-secret"] == SECRET
    assert {name: seen.headers[name] for name in kept} == kept
    assert not {"authorization", "cookie", "x-forwarded-for", "x-api-key"} & set(seen.headers)
    assert "client" not in seen.headers.get("user-agent", "")


def judge() -> Config:
    """A hot model that scores, with sampling values of its own."""
    plain = {"plain": {"temperature": 0.7}}
    hot = {"id": HOT, "tier": "resident", "source": "org/hot", "context": 64, "abilities": ["score"], "sampling": plain}
    return Config.model_validate({"models": [hot]})


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/tokenize", {"messages": [{"role": "user", "content": PROMPT}], "add_generation_prompt": False}),
        ("/tokenize", {"prompt": PROMPT, "return_token_strs": None}),
        ("/detokenize", {"tokens": [1, 2]}),
        ("/v1/score", {"text_1": PROMPT, "text_2": [PROMPT], "vendor": [None]}),
        ("/v1/rerank", {"query": PROMPT, "documents": [PROMPT], "top_n": 1}),
    ],
)
@pytest.mark.parametrize("streaming", [{}, {"stream": True}, {"stream": False}], ids=str)
async def test_tokens_and_scores_pass_both_ways_as_they_are(
    path: str, fields: dict[str, Any], streaming: dict[str, Any]
) -> None:
    said = {"count": 2, "tokens": [1, 2]}
    async with behind(answer(200, said, pieces=2), settings=judge()) as (app, (upstream,)):
        call = await Call(app, fields | streaming, path=path).done()
    (seen,) = upstream.seen
    assert (seen.path, seen.body) == (path, fields | streaming | {"model": HOT})
    assert (call.status, call.body) == (200, orjson.dumps(said))
    assert call.headers["content-type"] == "application/json"
    assert (call.headers["x-router-model"], call.headers["x-router-model-source"]) == (HOT, "default")


@pytest.mark.parametrize("model", [{}, {"model": "embedder"}, {"model": COLD}], ids=str)
@pytest.mark.parametrize("path", ["/v1/score", "/v1/rerank"])
async def test_scores_that_no_model_has_wake_none(pool: Pool, path: str, model: dict[str, Any]) -> None:
    call = await refused(pool, {"query": PROMPT, "documents": [PROMPT], **model}, path=path)
    assert (call.status, call.error["code"], call.error["param"]) == (400, "unsupported_model", "model")


@pytest.mark.case(82)
async def test_requests_with_the_same_id_get_ids_of_their_own_at_the_engine() -> None:
    async with behind(answer(200, {})) as (app, (upstream,)):
        calls = [await Call(app, body(), headers={"x-request-id": "same"}).done() for _ in range(2)]
    assert [call.headers["x-request-id"] for call in calls] == ["same", "same"]
    ids = {seen.headers["x-request-id"] for seen in upstream.seen}
    assert len(ids | {"same"}) == 3


@pytest.mark.case(82)
@pytest.mark.parametrize("wild", ["a b\té", "", " ", "x" * 129, "x" * 300, "x" * 60_000])
async def test_wild_request_id_is_replaced(wild: str) -> None:
    async with behind(answer(200, {})) as (app, _):
        call = await Call(app, body(), headers={"x-request-id": wild}).done()
    assert re.fullmatch("[0-9a-f]{32}", call.headers["x-request-id"])


@pytest.mark.case(82)
@pytest.mark.parametrize("wild", ["a\r\nset-cookie: b", "a\0b"])
async def test_request_id_that_is_more_than_a_value_is_not_said_back(wild: str) -> None:
    """A connection takes the first for two headers, and refuses the other."""
    async with behind(answer(200, {})) as (app, _):
        call = await Call(app, body(), headers={"x-request-id": wild}).done()
    assert "set-cookie" not in call.headers
    assert wild not in call.headers.values()


@pytest.mark.case(82)
@pytest.mark.parametrize("own", ["job/42", "a%0d%0ab", "x" * 128, "{}<>"])
async def test_any_id_in_signs_that_print_is_kept(own: str) -> None:
    async with behind(answer(200, {})) as (app, (upstream,)):
        call = await Call(app, body(), headers={"x-request-id": own}).done()
    assert call.headers["x-request-id"] == own
    # What an engine repeats in every chunk is short, and nobody else's.
    assert re.fullmatch("[0-9a-f]{32}", upstream.seen[0].headers["x-request-id"])


async def test_answer_says_how_it_was_decided() -> None:
    call = await asked(answer(200, {}), model="nick", mode="thinking")
    assert call.headers["x-router-model"] == HOT
    assert call.headers["x-router-model-source"] == "alias"
    assert call.headers["x-router-thinking"] == "off"
    assert "cannot think" in call.headers["x-router-warning"]


# What never reaches an engine


async def refused(pool: Pool, *args: Any, settings: Config | None = None, **kwargs: Any) -> Call:
    async with routed(pool, settings) as app:
        call = await Call(app, *args, **kwargs).done()
    assert PROMPT not in call.error["message"]
    assert pool.asked == []
    return call


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{not json",
        b'{"messages": "' + PROMPT.encode() + b'" oops}',
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"messages": "\xff\xfe"}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 100_000,
    ],
)
async def test_bad_json_is_a_400(pool: Pool, raw: bytes) -> None:
    call = await refused(pool, raw)
    assert (call.status, call.error["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("depth", [200, 260, 900])
async def test_deeply_nested_body_is_answered_or_a_400(depth: int) -> None:
    raw = b'{"messages":[{"role":"user","content":"hi"}],"vendor":' + b"[" * depth + b"]" * depth + b"}"
    async with behind(answer(200, {})) as (app, _):
        call = await Call(app, raw).done()
    assert call.status in (200, 400)
    assert call.status == 200 or call.error


@pytest.mark.parametrize("number", [b"1e400", b"123456789012345678901234567890", b"-0", b"1e-400"])
async def test_odd_numbers_are_answered_or_a_400(number: bytes) -> None:
    raw = b'{"messages":[{"role":"user","content":"hi"}],"seed":' + number + b',"vendor":' + number + b"}"
    async with behind(answer(200, {})) as (app, _):
        call = await Call(app, raw).done()
    assert call.status in (200, 400)


@pytest.mark.parametrize("headers", [{"content-length": "2000"}, {}], ids=["announced", "counted"])
async def test_too_large_body_is_a_413(pool: Pool, headers: dict[str, str]) -> None:
    chunks = [b'{"messages": "' + PROMPT.encode(), b"x" * 900, b'"}']
    chunks.insert(2, b"y" * (2000 - sum(map(len, chunks))))
    call = await refused(pool, chunks=chunks, headers=headers, settings=config(max_body_bytes=1024))
    assert (call.status, call.error["code"]) == (413, "request_too_large")


async def test_body_of_exactly_the_limit_is_taken() -> None:
    raw = orjson.dumps(body(pad=""))
    raw = orjson.dumps(body(pad="x" * (1024 - len(raw))))
    async with behind(answer(200, {}), settings=config(max_body_bytes=1024)) as (app, _):
        call = await Call(app, raw, headers={"content-length": "1024"}).done()
    assert (len(raw), call.status) == (1024, 200)


async def test_body_that_does_not_arrive_is_a_408(pool: Pool) -> None:
    call = await refused(pool, chunks=[b'{"mess'], unfinished=True, settings=config(body_timeout_s=0.02))
    assert (call.status, call.error["code"]) == (408, "body_timeout")


@pytest.mark.case(118)
@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-encoding": "gzip"},
    ],
)
async def test_other_content_types_are_a_415(pool: Pool, headers: dict[str, str]) -> None:
    assert (await refused(pool, body(), headers=headers)).status == 415


@pytest.mark.parametrize(
    "content_type", ["", "application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.api+json"]
)
async def test_every_way_to_say_json_is_taken(content_type: str) -> None:
    async with behind(answer(200, {})) as (app, _):
        assert (await Call(app, body(), headers={"content-type": content_type}).done()).status == 200


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "nope"}, 404, "model"),
        ({"model": "embedder"}, 400, "model"),
        ({"model": COLD, "temperature": "hot"}, 400, "temperature"),
        ({"model": COLD, "max_tokens": 5000}, 400, "max_tokens"),
        ({"model": COLD, "messages": []}, 400, "messages"),
    ],
)
async def test_wrong_request_wakes_no_model(pool: Pool, fields: dict[str, Any], status: int, param: str) -> None:
    call = await refused(pool, body() | fields)
    assert (call.status, call.error["param"]) == (status, param)
    assert call.headers["x-request-id"]


@pytest.mark.case(116)
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("PUT", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/v1/models/" + HOT, 405),
        ("POST", "/nope", 404),
        ("GET", "/", 404),
        ("POST", "/v1/v1/chat/completions", 404),
        ("POST", "/V1/chat/completions", 404),
        ("GET", "/v1/models/nope", 404),
    ],
)
async def test_wrong_path_or_method_is_refused_in_openais_shape(
    pool: Pool, method: str, path: str, status: int
) -> None:
    call = await refused(pool, path=path, method=method)
    assert (call.status, call.error["type"]) == (status, "invalid_request_error")
    assert status != 405 or call.headers["allow"]


async def test_router_takes_no_more_than_its_limit_and_recovers() -> None:
    async with behind(silent, settings=config(max_in_flight=1)) as (app, (upstream,)):
        first = Call(app, body())
        await asyncio.wait_for(upstream.arrived.wait(), 5)
        second = await Call(app, body()).done()
        assert (second.status, second.error["code"]) == (503, "overloaded")
        first.disconnect()
        await first.done()
        upstream.script = answer(200, {})
        assert (await Call(app, body()).done()).status == 200


# The list of models


async def got(pool: Pool, path: str) -> Call:
    async with routed(pool) as app:
        return await Call(app, path=path, method="GET").done()


@pytest.mark.case(116)
async def test_every_listed_model_can_be_fetched_by_its_id(pool: Pool) -> None:
    listed = (await got(pool, "/v1/models")).json["data"]
    assert {card["id"] for card in listed} == {HOT, COLD, "embedder", "auto"}
    for card in listed:
        assert (card["object"], type(card["created"]), type(card["owned_by"])) == ("model", int, str)
    for card in listed:
        fetched = await got(pool, f"/v1/models/{card['id']}")
        assert (fetched.status, fetched.json["id"]) == (200, card["id"])


@pytest.mark.case(116)
async def test_model_is_fetched_by_its_alias_and_an_id_with_a_slash(pool: Pool) -> None:
    assert (await got(pool, "/v1/models/nick")).json["id"] == HOT
    assert (await got(pool, f"/v1/models/{HOT}")).json["tier"] == "resident"


@pytest.mark.case(67, 116)
async def test_cold_model_is_listed_with_its_state_and_wakes_nothing(pool: Pool) -> None:
    card = (await got(pool, f"/v1/models/{COLD}")).json
    assert (card["state"], card["expected_wake_s"], pool.asked) == ("stopped", 30, [])


@pytest.mark.case(67)
async def test_ready_tells_whether_the_resident_model_answers(pool: Pool) -> None:
    assert (await got(pool, "/health")).status == 200
    assert (await got(pool, "/ready")).status == 503
    async with behind(answer(200, {})) as (app, (upstream,)):
        assert (await Call(app, path="/ready", method="GET").done()).status == 200
        upstream.script = answer(500, {})
        assert (await Call(app, path="/ready", method="GET").done()).status == 503


@pytest.mark.case(115)
@pytest.mark.parametrize("state", ["failed", "stopped", "loading", "unloading", "asleep"])
async def test_trouble_of_a_lazy_model_is_a_detail_of_readiness(pool: Pool, state: str) -> None:
    async with behind(answer(200, {})) as (app, _):
        set_replicas(
            "Pool", [Replica("pool-0", {}, SECRET, {COLD: PublishedModel(state, failure="it was killed")}, True)]
        )
        ready = await Call(app, path="/ready", method="GET").done()
        assert (ready.status, ready.json["models"][HOT], ready.json["models"][COLD]) == (200, "awake", state)
        # By its alias the hot model answers as readiness says.
        assert (await Call(app, body(model="nick")).done()).status == 200


@pytest.mark.parametrize(("path", "method"), [("/v1/models", "GET"), ("/nowhere", "GET"), ("/v1/completions", "GET")])
async def test_every_answer_has_a_request_id(pool: Pool, path: str, method: str) -> None:
    async with routed(pool) as app:
        own = await Call(app, path=path, method=method, headers={"x-request-id": "job/42"}).done()
        assert own.headers["x-request-id"] == "job/42"
        assert (await Call(app, path=path, method=method).done()).headers["x-request-id"]


async def test_fault_of_our_own_is_a_500_in_openais_shape_and_logged_without_a_word_of_the_prompt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def breaks(*given: object) -> None:
        raise RuntimeError(PROMPT)

    async with behind(answer(200, {})) as (app, _):
        monkeypatch.setattr(app._decider, "decide", breaks)
        call = await Call(app, body()).done()
    assert (call.status, call.error["code"]) == (500, "internal_error")
    assert "RuntimeError" in caplog.text
    assert PROMPT not in caplog.text + str(call.json)
