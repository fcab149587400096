"""serve_app.router.messages_shape: what clients of the Messages API get of an answer, in any pieces or whole."""

from __future__ import annotations

import itertools
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.router.messages_shape import MessagesShape

Event = dict[str, Any]


def block(kind: str, text: str) -> Event:
    return {"type": kind, kind: text}


def answer(*blocks: Event, stop: str = "end_turn") -> Event:
    return {"type": "message", "content": list(blocks), "stop_reason": stop, "stop_sequence": None}


def whole(given: Event, **shape: Any) -> Event:
    result: Event = orjson.loads(MessagesShape(**shape).whole(orjson.dumps(given)))
    return result


def event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: ".encode() + orjson.dumps({"type": kind, **fields}) + b"\n\n"


def pieces(index: int, kind: str, *texts: str) -> list[bytes]:
    name = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}[kind]
    delta = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}[kind]
    return [
        event("content_block_start", index=index, content_block={"type": kind}),
        *(event("content_block_delta", index=index, delta={"type": delta, name: text}) for text in texts),
        event("content_block_stop", index=index),
    ]


def stream(*blocks: list[bytes], stop: str = "end_turn") -> list[bytes]:
    last = event("message_delta", delta={"stop_reason": stop, "stop_sequence": None}, usage={"output_tokens": 3})
    return [event("message_start", message={}), *(one for each in blocks for one in each), last, event("message_stop")]


def read(events: list[bytes], **shape: Any) -> tuple[list[Event], Event]:
    """The blocks that a client puts together, and how the answer ended. Each block is begun and ended once."""
    shaped = MessagesShape(**shape)
    blocks: list[Event] = []
    ended: Event = {}
    is_open = False
    for raw in b"".join(map(shaped.events, events)).split(b"\n\n")[:-1]:
        name, _, line = raw.partition(b"\ndata: ")
        one = orjson.loads(line)
        assert name == b"event: " + one["type"].encode()
        match one["type"]:
            case "content_block_start":
                assert not is_open
                assert one["index"] == len(blocks)
                is_open = True
                blocks.append({"type": one["content_block"]["type"], "text": ""})
            case "content_block_delta":
                assert is_open
                delta = one["delta"]
                blocks[one["index"]]["text"] += delta.get("text") or delta.get("thinking") or delta["partial_json"]
            case "content_block_stop":
                assert is_open
                is_open = False
            case "message_delta":
                ended = one["delta"]
    assert not is_open
    return blocks, ended


def test_answer_with_nothing_to_do_is_the_same_object() -> None:
    raw = orjson.dumps(answer(block("text", "x")))
    assert MessagesShape().whole(raw) is raw
    data = event("ping")
    assert MessagesShape().events(data) is data


# Stop sequences, where the model thinks

STOPS = ["END", "\n\n"]


@pytest.mark.parametrize(
    ("text", "left", "stop"),
    [
        ("one END two", "one ", "END"),
        ("one\n\ntwo END", "one", "\n\n"),
        ("END", "", "END"),
        ("one EN", "one EN", None),
        ("one", "one", None),
    ],
)
def test_answer_ends_before_the_first_stop_sequence_and_the_thought_does_not(
    text: str, left: str, stop: str | None
) -> None:
    got = whole(answer(block("thinking", "END of it"), block("text", text)), stops=STOPS)
    assert got["content"][0] == block("thinking", "END of it")
    assert "".join(each["text"] for each in got["content"][1:]) == left
    assert (got["stop_reason"], got["stop_sequence"]) == (("stop_sequence", stop) if stop else ("end_turn", None))


@given(text=st.text("EN D\n", max_size=14), cuts=st.lists(st.integers(0, 14), max_size=6), tool=st.booleans())
def test_stream_in_any_pieces_is_the_whole_answer(text: str, cuts: list[int], tool: bool) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[start:end] for start, end in itertools.pairwise(edges)]
    call = [pieces(2, "tool_use", '{"a":', "1}")] if tool else []
    blocks, ended = read(stream(pieces(0, "thinking", "END"), pieces(1, "text", *parts), *call), stops=STOPS)
    uses = [{"type": "tool_use", "id": "t", "name": "n", "input": {"a": 1}}] if tool else []
    expected = whole(answer(block("thinking", "END"), block("text", text), *uses), stops=STOPS)
    assert blocks[0] == {"type": "thinking", "text": "END"}
    assert blocks[1]["text"] == "".join(each["text"] for each in expected["content"] if each["type"] == "text")
    assert len(blocks) - 2 == len([each for each in expected["content"] if each["type"] == "tool_use"])
    assert (ended["stop_reason"], ended["stop_sequence"]) == (expected["stop_reason"], expected["stop_sequence"])


# Tools

CUT = 'Let me see. <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "g", "arg'


def test_call_that_the_limit_cuts_is_no_markup_in_the_text() -> None:
    got = whole(answer(block("text", CUT), stop="max_tokens"), tools=True)
    text, call = got["content"]
    assert text == block("text", "Let me see.")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "f", {"a": 1})
    assert call["id"]
    assert got["stop_reason"] == "max_tokens"


def test_call_that_the_parser_found_stays_as_it_is() -> None:
    given = answer({"type": "tool_use", "id": "t", "name": "f", "input": {"a": "<tool_call>"}}, stop="tool_use")
    assert whole(given, tools=True) == given


MISPLACED = 'I call <tool_call>{"name": "f", "arguments": {}}</tool_call>'


def test_call_inside_the_thought_is_text_streamed_or_not() -> None:
    call = '{"name": "f", "arguments": {}}'
    got = whole(answer(block("thinking", MISPLACED)), tools=True)
    assert got["content"][1] == block("text", call)
    blocks, _ = read(stream(pieces(0, "thinking", MISPLACED[:20], MISPLACED[20:])), tools=True)
    assert blocks[1] == {"type": "text", "text": call}


def test_an_answer_that_says_something_is_left_alone() -> None:
    blocks, _ = read(stream(pieces(0, "thinking", MISPLACED), pieces(1, "text", "ok")), tools=True)
    assert [each["text"] for each in blocks] == [MISPLACED, "ok"]


def test_empty_answer_keeps_its_one_empty_block() -> None:
    assert whole(answer(block("text", "")), tools=True)["content"] == [block("text", "")]
