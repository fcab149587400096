"""serve_app.conversations.answer: what is kept of an answer, and that nothing is kept of one that broke off."""

from typing import Any

import orjson
import pytest

from serve_app.conversations.answer import Answer, ChatAnswer, Events, ResponseAnswer
from serve_app.conversations.history import Item

DONE = b"data: [DONE]\n\n"


def event(finish: str | None = None, index: int = 0, **delta: Any) -> bytes:
    return b"data: " + orjson.dumps({"choices": [{"index": index, "delta": delta, "finish_reason": finish}]}) + b"\n\n"


def read(answer: Answer, data: bytes, size: int = 10_000) -> Answer:
    events = Events()
    for start in range(0, len(data), size):
        for each in events.feed(data[start : start + size]):
            answer.event(each)
    return answer


def streamed(*events: bytes, size: int = 10_000) -> Item | None:
    answer = ChatAnswer()
    read(answer, b"".join(events), size)
    assert answer.ended == (answer.message is not None)
    return answer.message


def whole(message: Item, finish: str = "stop") -> Item | None:
    answer = ChatAnswer()
    answer.whole(orjson.dumps({"choices": [{"index": 0, "message": message, "finish_reason": finish}]}))
    return answer.message


def call(arguments: str, call_id: str = "a", name: str = "f") -> Item:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


TEXT = [event(role="assistant", content=""), event(content="Hé"), event(content="llo 世"), event("stop", content="界")]
USAGE = b'data: {"choices":[],"usage":{"total_tokens":3}}\n\n'


@pytest.mark.parametrize("size", [1, 3, 17, 10_000])
def test_a_stream_is_put_together_however_it_is_cut(size: int) -> None:
    assert streamed(b": loading 40%\n\n", *TEXT, USAGE, DONE, size=size) == {
        "role": "assistant",
        "content": "Héllo 世界",
    }


def test_reasoning_is_not_kept() -> None:
    thought = {"reasoning": "hm", "reasoning_content": "hm"}
    expected = {"role": "assistant", "content": "yes"}
    assert streamed(event(**thought), event("stop", content="yes"), DONE) == expected
    assert whole({"role": "assistant", "content": "yes", **thought}) == expected


@pytest.mark.parametrize(
    "events",
    [
        TEXT,
        [*TEXT[:-1], DONE],
        [*TEXT, b'data: {"error":{"code":"engine_died"}}\n\n', DONE],
        [*TEXT[:2], b'data: {"error":{"code":"engine_died"}}\n\n', DONE],
        [event("content_filter", content="x"), DONE],
        [event("error", content="x"), DONE],
        [event("length", reasoning="only a thought"), DONE],
        [DONE],
    ],
)
def test_an_answer_that_did_not_end_well_is_not_kept(events: list[bytes]) -> None:
    assert streamed(*events) is None


def test_a_plain_answer_that_did_not_end_well_is_not_kept() -> None:
    assert whole({"content": "x"}, "content_filter") is None
    assert whole({"content": None}) is None
    answer = ChatAnswer()
    answer.whole(b'{"choices":[]}')
    answer.whole(b"[]")
    assert not answer.ended


def test_pieces_of_tool_calls_are_added_up() -> None:
    pieces = [
        event(tool_calls=[{"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}]),
        event(tool_calls=[{"index": 0, "function": {"arguments": '{"x":'}}]),
        event(tool_calls=[{"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}}]),
        event(tool_calls=[{"index": 0, "function": {"arguments": "1}"}}]),
        event("tool_calls"),
        DONE,
    ]
    assert streamed(*pieces) == {
        "role": "assistant",
        "content": None,
        "tool_calls": [call('{"x":1}'), call("{}", "b", "g")],
    }


def test_a_plain_answers_calls_are_kept() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call('{"x":1}')]}
    assert whole(message, "tool_calls") == message


def test_a_call_that_was_cut_off_is_not_kept() -> None:
    message = {"role": "assistant", "content": "I ask", "tool_calls": [call('{"x":')]}
    assert whole(message, "length") == {"role": "assistant", "content": "I ask"}
    assert whole({**message, "content": None}, "length") is None


def test_only_the_first_of_several_choices_is_kept() -> None:
    assert streamed(event(index=1, content="b"), event("stop", content="a"), event("stop", 1), DONE) == {
        "role": "assistant",
        "content": "a",
    }


# Responses

OUTPUT: list[dict[str, Any]] = [
    {"type": "reasoning", "id": "rs_1", "content": []},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]},
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "function_call", "call_id": "b", "name": "f", "arguments": '{"x"'},
]


def response(status: str = "completed") -> dict[str, Any]:
    return {"id": "resp_1", "object": "response", "status": status, "output": OUTPUT}


def response_event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"


@pytest.mark.parametrize("size", [1, 50, 10_000])
def test_a_response_is_kept_without_reasoning_and_cut_calls(size: int) -> None:
    answer = ResponseAnswer()
    text = response_event("response.output_text.delta", delta="the word response.completed is only text")
    read(answer, response_event("response.created", response=response("in_progress")) + text, size)
    assert not answer.ended
    read(answer, response_event("response.completed", response=response()), size)
    assert answer.ended
    assert answer.items == OUTPUT[1:3]


@pytest.mark.parametrize("status", ["failed", "in_progress", "cancelled"])
def test_a_response_that_did_not_end_well_is_not_kept(status: str) -> None:
    answer = ResponseAnswer()
    answer.whole(orjson.dumps(response(status)))
    read(answer, response_event("response.failed", response=response(status)))
    read(answer, b'data: {"error":{}}\n\n' + DONE)
    assert not answer.ended
