"""Field cases of the kinds reasoning, tools, structured and API compat, by their rank in the collection, on vLLM.

Others need no real engine to show: 17, 65 in test_thinking, 32, 46, 49, 88 in test_outgoing, 94 in test_shape
(tests/unit); 4, 14 in test_errors, 28, 116 in test_resident (tests/e2e).
"""

from __future__ import annotations

import gzip
import json
import socket
import threading
from typing import Any

import pytest

from tests.e2e.conftest import QWEN, RESIDENT
from tests.e2e.conversation import COMPACT_CALL, ENDS_THE_THOUGHT, LOOSE, NAMED, WEATHER, Answer, ask, leaning_to
from tests.e2e.service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.real_engine]

ON = {"chat_template_kwargs": {"enable_thinking": True}}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
BOTH_WAYS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def body(text: str = "2+2?", **fields: Any) -> dict[str, Any]:
    """A request to the model that has Qwen3's template and parsers."""
    return {"model": QWEN, "messages": user(text), "max_tokens": 40, "temperature": 0, **fields}


def forced(regex: str) -> dict[str, Any]:
    return {"structured_outputs": {"regex": regex}}


def thought(**fields: Any) -> dict[str, Any]:
    """A request whose thought ends after some tokens."""
    return body("Which is larger, 9.11 or 9.8?", **{**ON, **ENDS_THE_THOUGHT, "temperature": 1, "seed": 8, **fields})


# Reasoning


@BOTH_WAYS
@pytest.mark.parametrize("model", [QWEN, RESIDENT])
def test_1_10_not_thinking_is_said_and_the_answer_is_content(real: Service, model: str, stream: bool) -> None:
    answer = ask(real, body("Say hello in Chinese.", model=model, **forced("你好")), stream=stream)
    assert (answer.content, answer.reasoning) == ("你好", None)
    assert not (answer.usage.get("completion_tokens_details") or {}).get("reasoning_tokens")


def test_2_the_clients_choice_and_vllms_own_fields_survive_the_rewrite_of_the_model(real: Service) -> None:
    fields = {"top_k": 20, "min_p": 0.0, "repetition_penalty": 1.05}
    answer = ask(real, body("Prove it.", **fields, **OFF))
    assert (answer.status, answer.headers["x-router-thinking-source"]) == (200, "enable_thinking")
    # A value that only vLLM can refuse shows that it got there.
    refused = ask(real, body(repetition_penalty=-1))
    assert (refused.status, refused.error["type"]) == (400, "invalid_request_error")


@BOTH_WAYS
def test_20_a_stop_string_ends_the_answer_and_not_the_thought(real: Service, stream: bool) -> None:
    answer = ask(real, thought(stop=["9.8"], max_tokens=100, **forced("9[.]11, 9[.]8 and so on")), stream=stream)
    assert answer.reasoning
    assert (answer.content, answer.finish) == ("9.11, ", "stop")


@BOTH_WAYS
def test_20_a_stop_string_that_occurs_only_in_the_thought_stops_nothing(real: Service, stream: bool) -> None:
    plain = ask(real, body("Go on.", **ON), stream=stream)
    stop = (plain.reasoning or "").strip()[:3]
    assert stop
    again = ask(real, body("Go on.", stop=stop, **ON), stream=stream)
    assert (again.reasoning, again.finish) == (plain.reasoning, "length")


@BOTH_WAYS
def test_29_62_a_cut_thought_is_reasoning_and_nothing_else(real: Service, stream: bool) -> None:
    answer = ask(real, body("Explain entropy.", max_tokens=20, **ON), stream=stream)
    assert answer.reasoning
    assert not answer.content
    assert answer.finish == "length"
    assert answer.usage["completion_tokens_details"]["reasoning_tokens"] == 20


def test_62_a_cut_thought_reads_the_same_streamed_or_not(real: Service) -> None:
    whole, joined = (
        ask(real, body("Explain entropy.", max_tokens=20, **ON), stream=stream) for stream in (False, True)
    )
    assert whole.reasoning == joined.reasoning


@BOTH_WAYS
def test_64_a_soft_switch_leaves_no_empty_thought_behind(real: Service, stream: bool) -> None:
    answer = ask(real, body("Capital of France? /no_think", **forced("Paris")), stream=stream)
    assert (answer.content, answer.reasoning) == ("Paris", None)
    assert answer.headers["x-router-thinking-source"] == "soft_switch"
    overruled = ask(real, body("Capital of France? /think", **OFF, **forced("Paris")), stream=stream)
    assert overruled.content == "Paris"
    assert "enable_thinking overrides soft_switch" in overruled.headers["x-router-warning"]


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
def test_65_effort_switches_thinking(real: Service, effort: str) -> None:
    answer = ask(real, body(reasoning_effort=effort))
    assert bool(answer.reasoning) is (effort != "none")


def test_65_an_unknown_effort_is_a_400_and_the_hard_switch_wins(real: Service) -> None:
    refused = ask(real, body(reasoning_effort="turbo"))
    assert (refused.status, refused.error["param"]) == (400, "reasoning_effort")
    assert not ask(real, body(reasoning_effort="high", **OFF)).reasoning


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_32_88_reasoning_in_the_history_is_taken_under_either_name(real: Service, name: str) -> None:
    history = [*user("Pick a number"), {"role": "assistant", name: "I choose 7", "content": "7"}, *user("Double it")]
    without = [*user("Pick a number"), {"role": "assistant", "content": "7"}, *user("Double it")]
    sizes = [
        ask(real, body(messages=messages, max_tokens=1, **OFF)).usage["prompt_tokens"]
        for messages in (history, without)
    ]
    # Qwen3's template drops thoughts before the last user turn.
    assert sizes[0] == sizes[1]


def test_88_reasoning_within_a_tool_loop_is_rendered_alike_under_either_name(real: Service) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}

    def size(**thought: str) -> int:
        turn = {"role": "assistant", "content": "", "tool_calls": [call], **thought}
        messages = [*user("Weather?"), turn, {"role": "tool", "tool_call_id": "c1", "content": "rain"}]
        return int(ask(real, body(messages=messages, tools=[WEATHER], max_tokens=1)).usage["prompt_tokens"])

    assert size(reasoning="I look it up") == size(reasoning_content="I look it up") > size()


@BOTH_WAYS
def test_112_tags_in_ordinary_prose_survive(real: Service, stream: bool) -> None:
    line = "use <think>draft</think> and <tool_call> tags"
    answer = ask(real, body(f"Copy this line exactly: {line}", **OFF, **forced(line)), stream=stream)
    assert answer.content == line


@BOTH_WAYS
def test_139_logprobs_come_with_the_reasoning_parser_on(real: Service, stream: bool) -> None:
    answer = ask(real, body(max_tokens=12, logprobs=True, top_logprobs=2, **ON), stream=stream)
    assert len(answer.logprobs) == answer.usage["completion_tokens"]


# Tools

CALL = r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": "Oslo"\}\}\n</tool_call>'


def tool_for(choice: Any) -> dict[str, Any]:
    """Forced by a regex where the choice is `auto`, by its own schema else."""
    return LOOSE if choice == "auto" else WEATHER


@BOTH_WAYS
def test_16_a_call_is_no_text_with_thinking_off(real: Service, stream: bool) -> None:
    answer = ask(real, body("Weather in Oslo?", tools=[LOOSE], max_tokens=80, **OFF, **forced(CALL)), stream=stream)
    (call,) = answer.calls
    assert json.loads(call["arguments"]) == {"city": "Oslo"}
    assert (answer.content, answer.finish) == (None, "tool_calls")


@BOTH_WAYS
@pytest.mark.parametrize("max_tokens", [1, 4, 8, 14])
@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
def test_40_a_call_that_was_cut_is_a_length_and_no_markup(
    real: Service, choice: Any, max_tokens: int, stream: bool
) -> None:
    fields = forced(CALL) if choice == "auto" else {}
    answer = ask(
        real,
        body(
            "Hi",
            tools=[LOOSE if choice == "auto" else WEATHER],
            tool_choice=choice,
            max_tokens=max_tokens,
            **OFF,
            **fields,
        ),
        stream=stream,
    )
    assert answer.finish == "length"
    assert not answer.calls or stream
    assert "tool_call" not in (answer.content or "")


def test_40_calls_that_were_complete_before_the_cut_are_kept_streamed_or_not(real: Service) -> None:
    three = body("Hi", tools=[LOOSE], max_tokens=60, **OFF, **forced(f"{CALL}\n{CALL}\n{CALL}"))
    whole, joined = (ask(real, three, stream=stream) for stream in (False, True))
    assert whole.finish == joined.finish == "length"
    assert whole.calls
    for answer in (whole, joined):
        assert answer.calls[0]["name"] == "get_weather"
        assert json.loads(answer.calls[0]["arguments"]) == {"city": "Oslo"}


@pytest.mark.parametrize(("choice", "finish"), [("auto", "tool_calls"), ("required", "tool_calls"), (NAMED, "stop")])
def test_41_the_finish_reason_of_a_call_is_the_same_streamed_or_not(real: Service, choice: Any, finish: str) -> None:
    # `required` lets a random model call again and again; one call at a time ends it.
    fields = forced(CALL) if choice == "auto" else {"parallel_tool_calls": False, "logit_bias": COMPACT_CALL}
    asked = body("Hi", tools=[tool_for(choice)], tool_choice=choice, max_tokens=300, **OFF, **fields)
    assert {ask(real, asked, stream=stream).finish for stream in (False, True)} == {finish}


def test_43_braces_and_chinese_in_arguments_survive_the_stream(real: Service) -> None:
    city = "{北京, a}b{"
    parameters = {"type": "object", "properties": {"city": {"enum": [city]}}, "required": ["city"]}
    function = {"name": "get_weather", "strict": True, "parameters": {**parameters, "additionalProperties": False}}
    call = r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": "\{北京, a\}b\{"\}\}\n</tool_call>'
    bias = {**COMPACT_CALL, **leaning_to(city, f'"{city}"', f'{{"city": "{city}"}}')}
    asked = body("Call it", tools=[{"type": "function", "function": function}], max_tokens=120, logit_bias=bias)
    for stream in (False, True):
        answer = ask(real, {**asked, **OFF, **forced(call)}, stream=stream)
        assert json.loads(answer.calls[0]["arguments"]) == {"city": city}


@BOTH_WAYS
@pytest.mark.parametrize(("parallel", "calls"), [(False, 1), (True, 2), (None, 2)])
def test_92_parallel_calls_can_be_switched_off(real: Service, parallel: bool | None, calls: int, stream: bool) -> None:
    asked = body("Both", tools=[LOOSE], max_tokens=120, **OFF, **forced(f"{CALL}\n{CALL}"))
    if parallel is not None:
        asked["parallel_tool_calls"] = parallel
    answer = ask(real, asked, stream=stream)
    assert len(answer.calls) == calls
    assert len({call["id"] for call in answer.calls}) == calls


def test_95_a_call_without_content_in_the_history_reads_the_same_however_it_is_written(real: Service) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
    forms = [{"content": None}, {"content": ""}, {}]
    sizes = [
        ask(
            real,
            body(
                messages=[*user("Weather?"), {"role": "assistant", "tool_calls": [call], **form}, result],
                tools=[WEATHER],
                max_tokens=1,
            ),
        ).usage["prompt_tokens"]
        for form in forms
    ]
    assert len(set(sizes)) == 1


def test_137_forty_tools_are_taken_or_refused_for_their_length(real: Service) -> None:
    def tools(count: int) -> list[dict[str, Any]]:
        nested = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"type": "string"}}}}}
        return [
            {"type": "function", "function": {"name": f"tool_{n}", "description": "d " * 500, "parameters": nested}}
            for n in range(count)
        ]

    assert ask(real, body("hi", tools=tools(1), max_tokens=4, **OFF)).status == 200
    refused = ask(real, body("hi", tools=tools(40), max_tokens=4, **OFF))
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")


@BOTH_WAYS
def test_142_integer_arguments_arrive_as_integers(real: Service, stream: bool) -> None:
    properties = {"first_int": {"type": "integer"}, "second_int": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    tool = {"type": "function", "function": {"name": "multiply", "parameters": schema}}
    call = r'<tool_call>\n\{"name": "multiply", "arguments": \{"first_int": 5, "second_int": 42\}\}\n</tool_call>'
    answer = ask(real, body("5 times forty two?", tools=[tool], max_tokens=100, **OFF, **forced(call)), stream=stream)
    assert json.loads(answer.calls[0]["arguments"]) == {"first_int": 5, "second_int": 42}


# Structured

BAD_SCHEMAS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "not-a-type"}}}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}},
        }
    },
    {"response_format": {"type": "json_schema", "json_schema": {}}},
    {"response_format": {"type": "yaml"}},
    forced("("),
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"regex": "a", "choice": ["b"]}},
]


@BOTH_WAYS
@pytest.mark.parametrize("fields", BAD_SCHEMAS, ids=str)
def test_25_31_a_bad_constraint_is_a_400_and_the_engine_lives_on(
    real: Service, fields: dict[str, Any], stream: bool
) -> None:
    refused = ask(real, body("Reply in JSON.", **OFF, **fields), stream=stream)
    assert refused.status == 400, refused
    assert refused.error["message"]
    assert ask(real, body("hi", max_tokens=2, **OFF)).status == 200


@BOTH_WAYS
def test_31_openais_wrapper_of_a_schema_json_mode_and_text_work(real: Service, stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo"]}, "population": {"type": "integer", "enum": [7]}},
        "required": ["city", "population"],
        "additionalProperties": False,
    }
    wrapped = {"type": "json_schema", "json_schema": {"name": "city_fact", "strict": True, "schema": schema}}
    answer = ask(real, body("City?", response_format=wrapped, max_tokens=60, **OFF), stream=stream)
    assert json.loads(answer.content or "") == {"city": "Oslo", "population": 7}
    assert ask(real, body("City?", response_format={"type": "text"}, **OFF), stream=stream).content
    assert ask(real, body("City?", structured_outputs={"choice": ["a", "b"]}, **OFF), stream=stream).content in (
        "a",
        "b",
    )


@BOTH_WAYS
def test_101_json_mode_does_not_run_into_white_space(real: Service, stream: bool) -> None:
    asked = body("Reply in JSON.", response_format={"type": "json_object"}, max_tokens=60, temperature=1, seed=5, **OFF)
    answer = ask(real, asked, stream=stream)
    assert "\n\n" not in (answer.content or "")
    assert "   " not in (answer.content or "")
    if answer.finish == "stop":
        json.loads(answer.content or "")


@pytest.mark.parametrize("form", ["uri", "date-time", "email"])
def test_100_a_format_in_a_tools_schema_works_or_is_named(real: Service, form: str) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "format": form}}, "required": ["x"]}
    tool = {"type": "function", "function": {"name": "visit", "parameters": schema}}
    answer = ask(real, body("Go", tools=[tool], tool_choice="required", max_tokens=60, **OFF))
    assert answer.status == 200 or (answer.status == 400 and "format" in answer.error["message"])


# API compat


@pytest.mark.parametrize("model", [QWEN, RESIDENT])
def test_49_50_system_messages_anywhere_and_developer_are_taken_by_every_model(real: Service, model: str) -> None:
    for messages in (
        [
            {"role": "system", "content": "Be brief."},
            *user("Hi"),
            {"role": "system", "content": "In French."},
            *user("?"),
        ],
        [{"role": "developer", "content": "Answer with one word."}, *user("Capital of France?")],
    ):
        assert ask(real, body(model=model, messages=messages, max_tokens=4)).status == 200


def test_50_a_developer_message_is_a_system_message(real: Service) -> None:
    sizes = {
        ask(
            real, body(messages=[{"role": role, "content": "One word."}, *user("Capital?")], max_tokens=1, **OFF)
        ).usage["prompt_tokens"]
        for role in ("developer", "system")
    }
    assert len(sizes) == 1


def test_46_what_servers_emit_is_taken_back(real: Service) -> None:
    emitted = {"role": "assistant", "content": "hello", "tool_calls": [], "function_call": None, "refusal": None}
    emitted |= {"audio": None, "annotations": []}
    assert ask(real, body(messages=[*user("hi"), emitted, *user("again")], max_tokens=2)).status == 200


def test_52_an_image_for_a_text_model_is_a_400_and_no_url_is_fetched(real: Service) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(1)
        visits: list[Any] = []
        watch = threading.Thread(target=lambda: visits.append(_visit(listener)))
        watch.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/cat.png"
        part = {"type": "image_url", "image_url": {"url": url}}
        messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]
        for model in (QWEN, "auto"):
            refused = ask(real, body(model=model, messages=messages))
            assert (refused.status, refused.error["code"]) == (400, "unsupported_content")
        watch.join()
    assert visits == [None]


def _visit(listener: socket.socket) -> Any:
    try:
        return listener.accept()
    except TimeoutError:
        return None


def test_97_98_no_tools_is_no_tools_however_it_is_said(real: Service) -> None:
    for fields in ({"tool_choice": "none"}, {"tools": None, "tool_choice": "auto"}, {"tools": []}):
        assert ask(real, body("poem", max_tokens=2, **fields)).status == 200
    assert ask(real, body("poem", tool_choice="required")).status == 400


def test_109_an_explicit_max_tokens_is_not_capped(real: Service) -> None:
    answer = ask(real, body("Count.", max_tokens=700, ignore_eos=True, **OFF))
    assert answer.usage["completion_tokens"] == 700


def test_110_what_does_not_fit_is_a_400_with_the_numbers_and_without_a_limit_the_rest_is_used(real: Service) -> None:
    long = "word " * 1900
    refused = ask(real, body(long, max_tokens=4000, **OFF))
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    assert "2048" in refused.error["message"]
    asked = body(long, ignore_eos=True, **OFF)
    del asked["max_tokens"]
    rest = ask(real, asked)
    assert rest.usage["total_tokens"] == 2048


def test_113_logprobs_without_alternatives(real: Service) -> None:
    answer = ask(real, body("hi", logprobs=True, max_tokens=3, ignore_eos=True, **OFF))
    assert [entry["top_logprobs"] for entry in answer.logprobs] == [[], [], []]
    assert ask(real, body("hi", top_logprobs=2, max_tokens=3)).status == 400


def test_118_only_listed_headers_go_on_and_a_compressed_body_is_refused(real: Service) -> None:
    odd = {"accept-encoding": "br", "connection": "close", "x-odd": "1"}
    assert ask(real, body("hi", max_tokens=2), headers=odd).status == 200
    packed = gzip.compress(json.dumps(body("hi")).encode())
    status, _, refused = real.request("/v1/chat/completions", data=packed, headers={"content-encoding": "gzip"})
    assert (status, refused["error"]["code"]) == (415, "unsupported_media_type")


def test_119_two_fields_are_enough(real: Service) -> None:
    answer: Answer = ask(real, {"model": RESIDENT, "messages": user("Where do llamas come from? One word.")})
    assert (answer.status, bool(answer.content)) == (200, True)
