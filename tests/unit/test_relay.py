"""The router in front of scripted engines: every byte and every fault as a client sees them."""

import asyncio

import orjson
import pytest
from asgi_call import Call
from relayed import (
    EVENTS,
    PROMPT,
    WHOLE,
    asked,
    behind,
    body,
    empty_tables,
    pool,
    refuses,
    through,
)
from scripted_upstream import (
    DONE,
    Script,
    answer,
    error,
    hang_up,
    silent,
    stream,
)

__all__ = ["empty_tables", "pool", "through"]


# Streams


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
