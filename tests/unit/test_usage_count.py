"""What an answer cost: counted always, however its bytes are cut, and shown to the client only if it asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from asgi_call import Call
from front import audited, body, event, front, usage_event
from hypothesis import given
from hypothesis import strategies as st
from scripted_upstream import DONE, answer, stream

from serve_app.router.tally import Tally
from serve_app.telemetry.audit import read_records

USAGE = usage_event(prompt_tokens=7, completion_tokens=5)
FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
EVENTS = [event("a"), event("b"), FINISH]
WHOLE = b"".join(EVENTS) + USAGE + DONE


async def streamed(directory: Path, size: int, **fields: Any) -> tuple[Call, dict[str, Any]]:
    pieces = [WHOLE[start : start + size] for start in range(0, len(WHOLE), size)]
    async with front(stream(*pieces), **audited(directory)) as (app, (upstream,)):
        call = await Call(app, body(stream=True, **fields)).done()
        assert upstream.seen[0].body["stream_options"]["include_usage"] is True
    (record,) = read_records(directory)
    return call, record


@pytest.mark.case(53)
@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
async def test_usage_is_hidden_from_who_did_not_ask_and_counted(
    tmp_path: Path, size: int, options: dict[str, bool] | None
) -> None:
    call, record = await streamed(tmp_path, size, **({} if options is None else {"stream_options": options}))
    assert call.body == b"".join(EVENTS) + DONE
    assert (record["prompt_tokens"], record["completion_tokens"], record["finish"]) == (7, 5, "stop")


@pytest.mark.case(53)
@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
async def test_usage_is_passed_on_to_who_asked_byte_for_byte(tmp_path: Path, size: int) -> None:
    call, record = await streamed(tmp_path, size, stream_options={"include_usage": True})
    assert call.body == WHOLE
    assert (record["prompt_tokens"], record["completion_tokens"]) == (7, 5)


@pytest.mark.parametrize("odd", ["yes", 1, [], [1], True])
async def test_odd_stream_options_are_no_fault_of_the_routers(odd: object) -> None:
    async with front(stream(WHOLE)) as (app, _):
        assert (await Call(app, body(stream=True, stream_options=odd)).done()).status in (200, 400)


@given(st.text(max_size=30))
def test_words_of_an_answer_are_never_taken_for_its_usage(text: str) -> None:
    said = '"choices":[],"usage":{"prompt_tokens":9}' + text + '"finish_reason":"length"'
    data = event(said)
    tally = Tally(hides=True)
    assert tally.events(data) == data
    assert tally.total == 0
    tally.events(FINISH + USAGE)
    tally.over()
    assert (tally.total, tally.finish) == (12, "stop")


def test_usage_of_the_responses_api_is_counted_and_stays() -> None:
    used = {"input_tokens": 7, "output_tokens": 5, "output_tokens_details": {"reasoning_tokens": 2}}
    done = b"data: " + orjson.dumps({"type": "response.completed", "response": {"usage": used}}) + b"\n\n"
    tally = Tally(hides=True)
    assert tally.events(done) == done
    assert (tally.prompt, tally.completion, tally.reasoning) == (7, 5, 2)


@pytest.mark.parametrize("odd", [None, [], {}, {"prompt_tokens": "7"}, {"prompt_tokens": None}])
async def test_answer_with_an_odd_usage_arrives_all_the_same(odd: object) -> None:
    async with front(answer(200, {"choices": [], "usage": odd})) as (app, _):
        call = await Call(app, body()).done()
        assert (call.status, call.json["usage"]) == (200, odd)
