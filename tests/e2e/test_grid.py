"""The whole grid on the real engine: thinking x stream x kind of answer, every cell twenty times.

The tiny Qwen3 has random weights, so what it says is forced by a grammar; template, reasoning parser, tool parser and
grammars are the real ones. Nor does it end a thought by itself: there the end is made likely.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.conftest import QWEN
from tests.e2e.conversation import COMPACT_CALL, ENDS_THE_THOUGHT, LOOSE, NAMED, WEATHER, Answer, ask, leaning_to
from tests.e2e.service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.real_engine]

RUNS = 20
AT_ONCE = 10
CALL = r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": "(Oslo|北京)"\}\}\n</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "北京"]}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}


def _is_plain(answer: Answer) -> None:
    assert answer.content
    assert not answer.calls
    assert answer.finish in ("stop", "length")


def _is_call(answer: Answer) -> None:
    assert answer.finish == "tool_calls"
    assert not answer.content
    assert answer.calls
    for call in answer.calls:
        assert call["name"] == "get_weather"
        assert json.loads(call["arguments"])["city"] in ("Oslo", "北京")


def _is_named_call(answer: Answer) -> None:
    """OpenAI's `finish_reason` for a call that the client itself named is `stop`."""
    (call,) = answer.calls
    assert json.loads(call["arguments"])["city"] in ("Oslo", "北京")
    assert answer.finish == "stop"


def _fits_schema(answer: Answer) -> None:
    assert set(json.loads(answer.content or "")) == {"city", "big"}
    assert answer.finish == "stop"


def _is_choice(answer: Answer) -> None:
    assert answer.content in ("Oslo", "北京")
    assert answer.finish == "stop"


Kind = tuple[dict[str, Any], Callable[[Answer], None]]
KINDS: dict[str, Kind] = {
    "plain": ({"structured_outputs": {"regex": "[a-z]{3,9}( [a-z]{2,7}){3}"}}, _is_plain),
    "tools auto": ({"tools": [LOOSE], "structured_outputs": {"regex": CALL}}, _is_call),
    "tools required": (
        {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "logit_bias": COMPACT_CALL},
        _is_call,
    ),
    "named tool": ({"tools": [WEATHER], "tool_choice": NAMED, "logit_bias": COMPACT_CALL}, _is_named_call),
    "JSON schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "c", "strict": True, "schema": SCHEMA}}},
        _fits_schema,
    ),
    "choice": ({"structured_outputs": {"choice": ["Oslo", "北京"]}}, _is_choice),
}
QUESTION = {"role": "user", "content": "Weather in Oslo?"}
ON = {"messages": [QUESTION], "chat_template_kwargs": {"enable_thinking": True}, **ENDS_THE_THOUGHT}
OFF = {"messages": [QUESTION], "chat_template_kwargs": {"enable_thinking": False}}
AUTO = {"messages": [QUESTION]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("thinking", "form"), [("on", ON), ("off", OFF), ("auto", AUTO)], ids=["on", "off", "auto"])
def test_every_cell_of_the_grid_has_its_shape(
    real: Service, thinking: str, form: dict[str, Any], stream: bool, kind: str
) -> None:
    fields, has_shape = KINDS[kind]

    def once(seed: int) -> bool:
        body = {"model": QWEN, "max_tokens": 300, "temperature": 1.0, "seed": seed, **form, **fields}
        if thinking == "on" and "logit_bias" in fields:
            # The end of the thought has to be as likely as the pieces of the call.
            body["logit_bias"] = {**fields["logit_bias"], **leaning_to("</think>")}
        answer = ask(real, body, stream=stream)
        assert answer.status == 200, answer.error
        has_shape(answer)
        # "auto" on an easy question: the router says no.
        assert answer.headers["x-router-thinking"] == ("on" if thinking == "on" else "off")
        thought = answer.usage["completion_tokens_details"]["reasoning_tokens"]
        assert bool(answer.reasoning) is (thought > 0)
        assert thinking == "on" or not thought
        if thinking == "auto":
            assert answer.headers["x-router-thinking-source"] in ("rule", "scorer", "constraint")
        return bool(answer.reasoning)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        thoughts = list(pool.map(once, range(RUNS)))
    assert sum(thoughts) > RUNS / 2 if thinking == "on" else not any(thoughts)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_auto_thinks_about_what_is_hard_and_leaves_room_for_the_answer(real: Service, stream: bool) -> None:
    text = "Prove that there are infinitely many primes congruent to 3 modulo 4."
    body = {"model": QWEN, "messages": [{"role": "user", "content": text}], "max_tokens": 512, "temperature": 0}
    answer = ask(real, body, stream=stream)
    assert (answer.headers["x-router-thinking"], answer.headers["x-router-thinking-source"]) == ("on", "rule")
    assert answer.headers["x-router-budget"] == "384"
    assert answer.reasoning
