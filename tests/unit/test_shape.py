"""serve_app.router.shape: answers have the form that clients expect, whole as in a stream, and else no change."""

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import orjson
import pytest
from catalogs import ALL_AWAKE, CATALOG, PLAIN, chat
from hypothesis import example, given, settings
from hypothesis import strategies as st
from judging import TOOLS

from serve_app.errors import ApiError
from serve_app.router.shape import Names, Shape, shape_of
from serve_app.router.tally import Tally
from serve_app.routing.decide import decide
from serve_app.routing.decision import Setting
from serve_app.routing.facts import Endpoint, read_facts
from serve_app.routing.outgoing import engine_body

CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"q": 1}'}}
MARKUP = '<tool_call>\n{"name": "look_up", "arguments": {"q": "Köln"}}\n</tool_call>'
CUT = '<tool_call>\n{"name": "look_up", "arguments": {"q": "K'


def answer(message: dict[str, Any], finish: str | None = "stop", **choice: Any) -> bytes:
    """A whole answer with one choice, as vLLM writes it."""
    full = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish, **choice}
    return orjson.dumps({"id": "a", "choices": [full], "usage": {"completion_tokens": 9}})


def event(delta: dict[str, Any], finish: str | None = None, index: int = 0, **choice: Any) -> bytes:
    """One event of a stream."""
    chunk = {"id": "a", "choices": [{"index": index, "delta": delta, "finish_reason": finish, **choice}]}
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def whole(shape: Shape, message: dict[str, Any], finish: str | None = "stop", **choice: Any) -> dict[str, Any]:
    """The one choice of a whole answer: its message, with `finish_reason` and `stop_reason` beside it."""
    found = orjson.loads(shape.whole(answer(message, finish, **choice)))["choices"][0]
    return {**found["message"], "finish_reason": found["finish_reason"], "stop_reason": found.get("stop_reason")}


def deltas(data: bytes) -> list[dict[str, Any]]:
    """The choices of the events, in order."""
    events = [part.removeprefix(b"data: ") for part in data.split(b"\n\n") if part]
    return [choice for part in events if part != b"[DONE]" for choice in orjson.loads(part)["choices"]]


def joined(data: bytes, index: int = 0) -> dict[str, Any]:
    """What a client makes of a stream: its pieces added up."""
    found: dict[str, Any] = {"content": "", "finish_reason": None, "stop_reason": None}
    for choice in deltas(data):
        if choice["index"] != index:
            continue
        for key, value in choice["delta"].items():
            if key != "role" and value:
                found[key] = found[key] + value if key in found else value
        for key in ("finish_reason", "stop_reason"):
            found[key] = choice.get(key) or found[key]
    return found


def streamed(shape: Shape, events: Iterable[bytes]) -> dict[str, Any]:
    """The pieces of a stream, added up; each event is shaped by itself."""
    return joined(b"".join(map(shape.events, [*events])))


def pieces(text: str, cuts: Sequence[int], field: str = "content") -> list[bytes]:
    """The text as events, cut at these places."""
    places = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    parts = (text[begin:end] for begin, end in itertools.pairwise(places))
    return [event({field: part}) for part in parts if part]


# The names of the reasoning


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ("both", {"reasoning", "reasoning_content"}),
        ("reasoning", {"reasoning"}),
        ("reasoning_content", {"reasoning_content"}),
    ],
)
@pytest.mark.parametrize("text", ["because", "", None])
def test_reasoning_has_the_names_that_are_configured(names: Names, wanted: set[str], text: str | None) -> None:
    message = whole(Shape(names=names), {"content": "4", "reasoning": text})
    assert {key: value for key, value in message.items() if key.startswith("reasoning")} == dict.fromkeys(wanted, text)
    (choice,) = deltas(Shape(names=names).events(event({"reasoning": text})))
    assert choice["delta"] == dict.fromkeys(wanted, text)


@pytest.mark.parametrize("names", ["both", "reasoning_content"])
def test_each_of_several_choices_has_its_reasoning_under_every_name(names: Names) -> None:
    choices = [{"index": index, "message": {"reasoning": text}} for index, text in enumerate([None, "because"])]
    body = orjson.loads(Shape(names=names).whole(orjson.dumps({"choices": choices})))
    assert [choice["message"]["reasoning_content"] for choice in body["choices"]] == [None, "because"]


def test_null_is_renamed_without_touching_another_byte() -> None:
    odd = b'{"choices":[{"message":{"content":"say \\"reasoning\\":null","reasoning":null},"x":1.0e-7,"y":1E3}]}'
    shaped = Shape(names="both").whole(odd)
    assert shaped == odd.replace(b',"reasoning":null}', b',"reasoning":null,"reasoning_content":null}')
    assert json.loads(shaped)["choices"][0]["message"]["content"] == 'say "reasoning":null'


def test_reasoning_that_the_text_only_talks_of_is_not_renamed() -> None:
    text = 'The field is {"reasoning": "x"}.'
    assert whole(Shape(names="both"), {"content": text})["content"] == text
    assert "reasoning_content" not in whole(Shape(names="both"), {"content": text})
    assert joined(Shape(names="both").events(event({"content": text})))["content"] == text


def test_several_events_in_one_chunk_are_each_renamed() -> None:
    data = event({"reasoning": "be"}) + event({"reasoning": "cause"}) + event({"content": "4"}, "stop")
    found = joined(Shape(names="both").events(data))
    assert (found["reasoning"], found["reasoning_content"], found["content"]) == ("because", "because", "4")


# What is not touched


@pytest.mark.parametrize(
    "shape",
    [Shape(), Shape(names="both"), Shape(names="reasoning_content")],
    ids=["plain", "both", "reasoning_content"],
)
def test_answer_without_anything_to_do_is_the_same_object(shape: Shape) -> None:
    body = answer({"content": "hello"})
    assert shape.whole(body) is body
    data = event({"content": "hello"}) + b"data: [DONE]\n\n"
    assert shape.events(data) is data


def test_content_of_a_stream_with_tools_is_the_same_object() -> None:
    data = event({"content": "hel"}) + event({"content": "lo"})
    assert Shape(names="both", tools=True).events(data) is data


def test_names_that_the_engine_uses_change_nothing() -> None:
    body = answer({"content": "4", "reasoning": "because"})
    assert Shape(names="reasoning").whole(body) is body
    data = event({"reasoning": "because"})
    assert Shape(names="reasoning").events(data) is data


@pytest.mark.parametrize("raw", [b"data: [DONE]\n\n", b": ping\n\n", b"event: x\ndata: 1\n\n"])
def test_events_that_are_no_chunks_pass_as_they_are(raw: bytes) -> None:
    shape = Shape(names="both", tools=True, stops=["END"])
    assert shape.events(event({"reasoning": "r"}) + raw).endswith(raw)


def test_usage_at_the_end_of_a_stream_passes() -> None:
    usage = b'data: {"id":"a","choices":[],"usage":{"completion_tokens":9}}\n\n'
    assert Shape(names="both", stops=["END"]).events(usage) == usage


def test_fields_that_nobody_knows_survive() -> None:
    body = orjson.loads(Shape(names="both", tools=True, stops=["END"]).whole(answer({"reasoning": "r", "vendor": [1]})))
    assert body["choices"][0]["message"]["vendor"] == [1]
    assert body["usage"] == {"completion_tokens": 9}


@pytest.mark.parametrize("body", [b'{"choices":null}', b"{}", b'{"choices":[{"index":0}]}', b'{"choices":[]}'])
def test_odd_answers_pass(body: bytes) -> None:
    shaped = Shape(names="both", tools=True, stops=["END"]).whole(body)
    assert orjson.loads(shaped) == orjson.loads(body)


# Stop strings


@pytest.mark.parametrize(
    ("text", "content", "stop"),
    [
        ("one END two", "one ", "END"),
        ("END", "", "END"),
        ("one two", "one two", None),
        ("one EN", "one EN", None),
        ("a\n\nb END", "a", "\n\n"),
        ("停止了吗", "", "停止"),
    ],
)
def test_answer_ends_before_the_first_stop_string(text: str, content: str, stop: str | None) -> None:
    stops = ["END", "\n\n", "停止"]
    for found in (
        whole(Shape(stops=stops), {"content": text}),
        streamed(Shape(stops=stops), [*pieces(text, range(len(text))), event({}, "stop")]),
    ):
        assert (found["content"], found["finish_reason"], found["stop_reason"]) == (content, "stop", stop)


def test_stop_string_in_the_thought_does_not_end_it() -> None:
    message = {"reasoning": "first END then", "content": "4"}
    assert whole(Shape(stops=["END"]), message)["reasoning"] == "first END then"
    found = streamed(
        Shape(stops=["END"]), [*pieces(message["reasoning"], [8], "reasoning"), event({"content": "4"}, "stop")]
    )
    assert (found["reasoning"], found["content"], found["stop_reason"]) == ("first END then", "4", None)


def test_answer_that_ran_on_to_its_limit_after_the_stop_string_has_stopped() -> None:
    assert whole(Shape(stops=["END"]), {"content": "a END b"}, "length")["finish_reason"] == "stop"
    found = streamed(Shape(stops=["END"]), [event({"content": "a END b"}), event({"content": "c"}, "length")])
    assert (found["content"], found["finish_reason"]) == ("a ", "stop")


def test_beginning_of_a_stop_string_is_held_back_until_it_is_none() -> None:
    shape = Shape(stops=["END"])
    assert [joined(shape.events(event({"content": text})))["content"] for text in ("a E", "N", "d of")] == [
        "a ",
        "",
        "ENd of",
    ]


def test_text_held_back_is_delivered_with_the_last_event() -> None:
    shape = Shape(stops=["END"])
    shape.events(event({"content": "a EN"}))
    found = joined(shape.events(event({}, "length")))
    assert (found["content"], found["finish_reason"]) == ("EN", "length")


def test_nothing_comes_after_a_stop_string() -> None:
    shape = Shape(stops=["END"])
    assert joined(shape.events(event({"content": "a END b"})))["content"] == "a "
    later = joined(shape.events(event({"content": "c"}) + event({"tool_calls": [{"index": 0}]})))
    assert (later["content"], "tool_calls" in later) == ("", False)


def test_nothing_comes_after_a_stop_string_in_one_piece_either() -> None:
    message = {"content": "a END b", "tool_calls": [CALL]}
    found = whole(Shape(tools=True, stops=["END"]), message, "tool_calls")
    assert (found["content"], found["finish_reason"], found.get("tool_calls")) == ("a ", "stop", None)


def test_text_behind_the_stop_string_is_not_in_the_log_probabilities() -> None:
    tokens = [{"token": token, "logprob": -0.1, "top_logprobs": []} for token in ("a ", "END", " hidden")]
    logprobs = {"content": tokens}
    assert b"hidden" not in Shape(stops=["END"]).whole(answer({"content": "a END hidden"}, logprobs=logprobs))
    shape = Shape(stops=["END"])
    events = [event({"content": token["token"]}, logprobs={"content": [token]}) for token in tokens]
    assert b"hidden" not in b"".join(map(shape.events, events))


@pytest.mark.case(44)
def test_choices_stop_each_for_itself() -> None:
    shape = Shape(stops=["END"])
    data = event({"content": "a EN"}, index=0) + event({"content": "b EN"}, index=1)
    data += event({"content": "D c"}, index=0) + event({"content": "d c"}, index=1)
    data += event({}, "stop", index=0) + event({}, "stop", index=1)
    shaped = shape.events(data)
    assert (joined(shaped, 0)["content"], joined(shaped, 1)["content"]) == ("a ", "b ENd c")
    assert (joined(shaped, 0)["stop_reason"], joined(shaped, 1)["stop_reason"]) == ("END", None)


STOPS = st.lists(st.text("ab。", min_size=1, max_size=4), min_size=1, max_size=3, unique=True)
TEXT = st.text("ab。", max_size=24)
CUTS = st.lists(st.integers(0, 24), max_size=8)


def stream_equals_whole(text: str, stops: list[str], cuts: list[int], finish: str) -> None:
    one = whole(Shape(stops=stops), {"content": text}, finish)
    many = streamed(Shape(stops=stops), [*pieces(text, cuts), event({}, finish)])
    assert many == {key: one[key] for key in many}


@settings(max_examples=500, deadline=None, database=None)
@given(
    TEXT,
    STOPS.filter(lambda stops: not any(a in b for a in stops for b in stops if a is not b)),
    CUTS,
    st.sampled_from(["stop", "length"]),
)
def test_stream_adds_up_to_the_whole_answer_wherever_it_is_cut(
    text: str, stops: list[str], cuts: list[int], finish: str
) -> None:
    stream_equals_whole(text, stops, cuts, finish)


@settings(max_examples=500, deadline=None, database=None)
@given(TEXT, STOPS, CUTS, st.sampled_from(["stop", "length"]))
@example("abcd", ["abcd", "bc"], [3], "stop")
def test_stream_adds_up_to_the_whole_answer_even_if_stop_strings_hold_each_other(
    text: str, stops: list[str], cuts: list[int], finish: str
) -> None:
    stream_equals_whole(text, stops, cuts, finish)


# Tool calls


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (CUT, None),
        (f"Let me look.\n{CUT}", "Let me look."),
        ("Let me look.\n<tool_call>", "Let me look."),
        ("Let me look.\n<tool_c", "Let me look."),
        ("Let me look.\n<tool_call>\n{", "Let me look."),
        ("<t", None),
    ],
)
def test_call_that_max_tokens_cut_is_not_in_the_content(content: str, text: str | None) -> None:
    found = whole(Shape(tools=True), {"content": content, "tool_calls": []}, "length")
    assert (found["content"], found["finish_reason"], "tool_calls" in found) == (text, "length", False)


def test_complete_calls_before_the_cut_survive() -> None:
    found = whole(Shape(tools=True), {"content": f"Two things.\n{MARKUP}\n{MARKUP}\n{CUT}", "tool_calls": []}, "length")
    assert (found["content"], found["finish_reason"]) == ("Two things.", "length")
    calls = found["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["look_up", "look_up"]
    assert [orjson.loads(call["function"]["arguments"]) for call in calls] == [{"q": "Köln"}] * 2
    assert {call["type"] for call in calls} == {"function"}
    assert len({call["id"] for call in calls}) == 2


@pytest.mark.parametrize(
    "markup",
    [
        "<tool_call>\nnot json\n</tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 7}</tool_call>',
    ],
)
def test_call_that_is_none_is_neither_call_nor_content(markup: str) -> None:
    found = whole(Shape(tools=True), {"content": f"Hm. {markup}{CUT}"}, "length")
    assert (found["content"], "tool_calls" in found) == ("Hm.", False)


def test_call_without_arguments_has_an_empty_object() -> None:
    found = whole(Shape(tools=True), {"content": f'<tool_call>{{"name": "now"}}</tool_call>{CUT}'}, "length")
    assert found["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}


@pytest.mark.parametrize("content", ["The tag <tool_call> begins a call.", "a <tool", "a <"])
def test_content_of_an_answer_that_ended_by_itself_is_kept(content: str) -> None:
    assert whole(Shape(tools=True), {"content": content})["content"] == content


def test_markup_is_only_looked_for_where_tools_were_given() -> None:
    body = answer({"content": CUT}, "length")
    assert Shape().whole(body) is body


def test_calls_that_the_engine_parsed_are_left_alone() -> None:
    found = whole(Shape(tools=True), {"content": None, "tool_calls": [CALL]}, "tool_calls")
    assert (found["tool_calls"], found["content"], found["finish_reason"]) == ([CALL], None, "tool_calls")


@pytest.mark.parametrize("calls", [{}, {"tool_calls": []}, {"tool_calls": None}])
def test_tool_calls_without_a_call_were_cut(calls: dict[str, Any]) -> None:
    found = whole(Shape(tools=True), {"content": "", **calls}, "tool_calls")
    assert (found["finish_reason"], "tool_calls" in found) == ("length", False)


def test_empty_list_of_calls_is_left_out() -> None:
    assert "tool_calls" not in whole(Shape(tools=True), {"content": "hello", "tool_calls": []})


def test_first_piece_of_a_call_has_arguments() -> None:
    first = {"index": 0, "id": "c1", "type": "function", "function": {"name": "look_up"}}
    more = {"index": 0, "function": {"arguments": '{"q": 1}'}}
    data = Shape(tools=True).events(event({"tool_calls": [first]}) + event({"tool_calls": [more]}))
    functions = [choice["delta"]["tool_calls"][0]["function"] for choice in deltas(data)]
    assert functions == [{"name": "look_up", "arguments": ""}, {"arguments": '{"q": 1}'}]


@pytest.mark.case(40, 94)
@pytest.mark.parametrize("before", ["", "Let me look."])
def test_stream_that_ends_in_a_call_nobody_got_is_an_error(before: str) -> None:
    shape = Shape(tools=True)
    shape.events(event({"content": before}))
    with pytest.raises(ApiError) as error:
        shape.events(event({}, "tool_calls"))
    assert (error.value.status, error.value.code) == (503, "invalid_tool_call")


def ended(tokens: int, thought: int, *before: bytes) -> list[bytes]:
    """What a client gets of a stream that stops by itself after so many tokens, and its usage."""
    tally = Tally(hides=False)
    shape = Shape(tools=True, tally=tally)
    usage = {
        "prompt_tokens": 1,
        "completion_tokens": tokens,
        "completion_tokens_details": {"reasoning_tokens": thought},
    }
    last = b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\n"
    return [shape.events(tally.events(data)) for data in (*before, event({}, "stop"), last, b"data: [DONE]\n\n")]


@pytest.mark.case(94)
def test_stream_that_ends_without_a_word_of_what_was_written_is_an_error() -> None:
    with pytest.raises(ApiError) as error:
        ended(46, 2)
    assert error.value.code == "invalid_tool_call"


def test_stream_of_an_answer_that_is_empty_ends_in_order() -> None:
    chunks = [deltas(data) for data in ended(5, 2)[:2]]
    assert [[choice.get("finish_reason") for choice in found] for found in chunks] == [[], ["stop"]]
    assert ended(5, 2)[-1] == b"data: [DONE]\n\n"


def test_stream_that_says_something_is_not_held_back() -> None:
    said = ended(46, 2, event({"content": "It rains."}))
    assert b'"stop"' in said[1]


def test_choice_that_calls_does_not_speak_for_another_one() -> None:
    shape = Shape(tools=True)
    shape.events(event({"tool_calls": [{"index": 0, **CALL}]}, index=0) + event({}, "tool_calls", index=0))
    with pytest.raises(ApiError):
        shape.events(event({}, "tool_calls", index=1))


@pytest.mark.case(94)
@pytest.mark.parametrize("content", ["<tool_call>look it up", "\n<tool_call> look it up</tool_call>"])
def test_call_without_an_object_is_text(content: str) -> None:
    assert whole(Shape(tools=True), {"content": content}, "stop")["content"] == "look it up"


@pytest.mark.case(94)
def test_call_of_nothing_is_an_error() -> None:
    with pytest.raises(ApiError) as error:
        whole(Shape(tools=True), {"content": "<tool_call>\n"}, "stop")
    assert error.value.code == "invalid_tool_call"


@pytest.mark.parametrize("call", [{"index": 0}, {"index": 0, "function": None}, {"index": 0, "id": "c"}])
def test_piece_of_a_call_without_a_function_passes(call: dict[str, Any]) -> None:
    data = Shape(tools=True).events(event({"tool_calls": [call]}))
    assert deltas(data)[0]["delta"]["tool_calls"] == [call]


@pytest.mark.case(94)
@pytest.mark.parametrize("names", ["both", "reasoning", "reasoning_content"])
def test_call_that_was_written_into_the_thought_comes_to_light(names: Names) -> None:
    thought = f"I should look it up. {MARKUP}"
    inner = '{"name": "look_up", "arguments": {"q": "Köln"}}'
    assert whole(Shape(names=names, tools=True), {"reasoning": thought, "content": None})["content"] == inner
    events = [*pieces(thought, range(0, 80, 7), "reasoning"), event({}, "stop")]
    assert streamed(Shape(names=names, tools=True), events)["content"] == inner


@pytest.mark.parametrize(
    ("message", "finish"),
    [
        ({"reasoning": f"{MARKUP}", "content": "It is 4."}, "stop"),
        ({"reasoning": f"{MARKUP}", "content": None, "tool_calls": [CALL]}, "tool_calls"),
        ({"reasoning": f"{MARKUP}", "content": None}, "length"),
        ({"reasoning": "nothing to call", "content": None}, "stop"),
    ],
)
def test_thought_stays_hidden_where_there_is_an_answer_or_it_was_cut(message: dict[str, Any], finish: str) -> None:
    assert whole(Shape(tools=True), message, finish)["content"] == message["content"]
    parts: list[dict[str, Any]] = [{"reasoning": message["reasoning"]}]
    parts += [{"content": message["content"]}] if message["content"] else []
    parts += [{"tool_calls": [{"index": 0, **CALL}]}] if message.get("tool_calls") else []
    found = streamed(Shape(tools=True), [*map(event, parts), event({}, finish)])
    assert found["content"] == (message["content"] or "")


@settings(max_examples=300, deadline=None, database=None)
@given(
    st.sampled_from(["", "so", f"so {MARKUP}", f"{MARKUP} so {CUT}"]),
    st.sampled_from(["", "4", "It is 4."]),
    st.lists(st.integers(0, 90), max_size=6),
    st.sampled_from(["stop", "length"]),
    st.sampled_from(["both", "reasoning", "reasoning_content"]),
)
def test_stream_with_thought_and_tools_adds_up_to_the_whole_answer(
    thought: str, content: str, cuts: list[int], finish: str, names: Names
) -> None:
    one = whole(Shape(names=names, tools=True), {"reasoning": thought, "content": content}, finish)
    events = [*pieces(thought, cuts, "reasoning"), *pieces(content, cuts), event({}, finish)]
    many = streamed(Shape(names=names, tools=True), events)
    assert {key: value for key, value in many.items() if value} == {
        key: value for key, value in one.items() if value and key != "role"
    }


# Which request needs what


def shape_for(body: dict[str, Any], endpoint: Endpoint = "chat", names: Names = "both") -> Shape:
    facts = read_facts(body, endpoint)
    decision = decide(facts, PLAIN, Setting({}))
    return shape_of(facts, decision, CATALOG.models[decision.model_id], names)


def test_completion_is_never_touched() -> None:
    shape = shape_for({"prompt": "x", "stop": "END", "model": "thinker"}, "completions")
    body = answer({"content": "a END b", "reasoning": "r"})
    assert shape.whole(body) is body


def test_model_that_cannot_think_keeps_its_own_names() -> None:
    body = answer({"content": "a", "reasoning": None})
    assert shape_for(chat(model="org/plain:1b")).whole(body) is body
    assert shape_for(chat()).whole(body) != body


@pytest.mark.parametrize(("mode", "content"), [("thinking", "a "), ("non_thinking", "a END b")])
def test_stop_strings_are_applied_where_the_engine_does_not_know_them(mode: str, content: str) -> None:
    assert whole(shape_for(chat(stop="END", mode=mode)), {"content": "a END b"})["content"] == content


def test_markup_is_taken_out_where_tools_were_given() -> None:
    assert whole(shape_for(chat(tools=TOOLS)), {"content": CUT}, "length")["content"] is None
    assert whole(shape_for(chat(tools=[])), {"content": CUT}, "length")["content"] == CUT


# What is no answer


@pytest.mark.parametrize("raw", [b"", b"oops", b"[1]", b'"text"', b"null", b'{"choices": [', b"data: {}"])
def test_what_an_engine_answers_instead_of_an_object_is_a_503_and_no_fault_of_ours(raw: bytes) -> None:
    shape = Shape(names="both", tools=True, stops=["x"])
    for reads in (shape.whole, lambda body: shape.events(b"data: " + body + b"\n\n")):
        with pytest.raises(ApiError) as refused:
            reads(raw)
        assert (refused.value.status, refused.value.code) == (503, "engine_error")


# After a thought


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\n\nHello", "Hello"),
        ("</think>\n\nHello", "Hello"),
        ("\n\n</think>\n\nHello\n\nyou\n", "Hello\n\nyou\n"),
        ("and so on</think>\n\nHello", "and so on\n\nHello"),
        ("\n\n    indented", "    indented"),
        ("Hello", "Hello"),
        ("\n\n", None),
    ],
)
def test_what_follows_a_thought_begins_with_its_text_and_holds_no_end_of_it(text: str, shown: str | None) -> None:
    assert whole(Shape(thinks=1), {"content": text, "reasoning": "hm"})["content"] == shown
    tokens = [token for token in re.split("(</think>|\n\n| )", text) if token]
    stream = [event({"role": "assistant", "content": ""}), event({"reasoning": "hm"})]
    stream += [event({"content": token}) for token in tokens] + [event({}, "stop")]
    shape = Shape(thinks=1)
    assert joined(b"".join(map(shape.events, stream)))["content"] == (shown or "")


def test_without_a_thought_text_is_as_it_came() -> None:
    body = answer({"content": "\n\nuse </think> tags"})
    assert Shape().whole(body) is body
    chunk = event({"content": "\n\nuse </think> tags"})
    assert Shape(tools=True).events(chunk) is chunk


def test_text_of_each_choice_begins_for_itself_and_is_then_passed_on_untouched() -> None:
    shape = Shape(thinks=2)
    first = shape.events(event({"content": "\n\na"}) + event({"content": "\n\nb"}, index=1))
    assert [choice["delta"]["content"] for choice in deltas(first)] == ["a", "b"]
    later = event({"content": "\n\nc"})
    assert shape.events(later) is later


def test_a_lost_call_behind_empty_lines_is_an_error_too() -> None:
    shape = Shape(tools=True, thinks=1, tally=(tally := Tally(completion=60, reasoning=20)))
    sent = shape.events(event({"content": "\n\n"}) + event({}, "stop"))
    assert tally.completion == 60
    with pytest.raises(ApiError, match="cannot be read"):
        shape.events(b"data: [DONE]\n\n")
    assert "stop" not in sent.decode()


@pytest.mark.parametrize(
    ("usage", "finish"),
    [
        ({"completion_tokens": 9, "total_tokens": 20}, "tool_calls"),
        ({"completion_tokens": 10, "total_tokens": 21}, "length"),
        ({"completion_tokens": 9, "total_tokens": 100}, "length"),
    ],
)
def test_an_answer_that_its_limit_ended_says_so_though_its_calls_are_whole(usage: dict[str, int], finish: str) -> None:
    said = orjson.loads(answer({"content": None, "tool_calls": [CALL]}, "tool_calls"))
    found = orjson.loads(Shape(tools=True, most=(10, 100)).whole(orjson.dumps({**said, "usage": usage})))
    assert found["choices"][0]["finish_reason"] == finish
    assert found["choices"][0]["message"]["tool_calls"] == [CALL]


# A thought in secret

FIELDS = ({"include_reasoning": False}, {"reasoning": {"exclude": True, "enabled": True}})


@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("names", ["both", "reasoning", "reasoning_content"])
def test_a_thought_that_is_not_wanted_is_in_no_answer(fields: dict[str, Any], names: Names) -> None:
    def shape() -> Shape:
        facts = read_facts(chat(chat_template_kwargs={"enable_thinking": True}, **fields), "chat")
        decision = decide(facts, PLAIN, Setting(ALL_AWAKE))
        model = CATALOG.models[decision.model_id]
        assert "include_reasoning" not in engine_body(facts, decision, model)
        return shape_of(facts, decision, model, names)

    told = {"logprobs": {"content": [{"token": "secret"}]}, "token_ids": [7]}
    found = shape().whole(answer({"content": "\n\n4", "reasoning": "secret"}, **told))
    assert b"secret" not in found
    assert orjson.loads(found)["choices"][0]["message"]["content"] == "4"
    stream = [event({"role": "assistant", "content": ""}), *(event({"reasoning": "secret"}, **told) for _ in range(3))]
    stream += [event({"content": "\n\n"}, **told), event({"content": "4"}, **told), event({}, "stop", **told)]
    passed = b"".join(map(shape().events, stream))
    assert b"secret" not in passed
    assert b"7" not in passed
    assert [choice["delta"].get("content") for choice in deltas(passed)] == ["", "", "4", None]
    assert joined(passed)["finish_reason"] == "stop"


def test_a_call_lost_in_a_secret_thought_comes_to_light_all_the_same() -> None:
    shape = Shape(tools=True, thinks=1, hides=True)
    stream = [event({"reasoning": piece}) for piece in ("hm ", "<tool_call>", "look it up")] + [event({}, "stop")]
    assert joined(b"".join(map(shape.events, stream)))["content"] == "look it up"


# Calls that are half ones


def piece(arguments: str, index: int = 0) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}


@pytest.mark.parametrize("finish", ["tool_calls", "stop"])
@pytest.mark.parametrize("arguments", ['{"city": "a', '{"city": "Oslo"}, "name": "look_up"', '{"city": "Oslo",}'])
def test_stream_whose_arguments_cannot_be_read_is_an_error_and_no_call(arguments: str, finish: str) -> None:
    shape = Shape(tools=True)
    shape.events(event(piece("{}")) + event(piece(arguments[:4], 1)) + event(piece(arguments[4:], 1)))
    with pytest.raises(ApiError, match="cannot be read"):
        shape.events(event({}, finish))


@pytest.mark.parametrize("arguments", ["", "{}", '{"city": "a</tool_call>b"}', '{"city": "\\ud83d"}', '{"n": 1e999}'])
def test_stream_whose_arguments_can_be_read_ends_in_order(arguments: str) -> None:
    shape = Shape(tools=True)
    sent = shape.events(event(piece(arguments[:3]))) + shape.events(event(piece(arguments[3:]), "tool_calls"))
    assert joined(sent)["finish_reason"] == "tool_calls"


def test_stream_that_its_limit_cut_in_a_call_ends_in_order() -> None:
    shape = Shape(tools=True)
    assert joined(shape.events(event(piece('{"ci')) + event({}, "length")))["finish_reason"] == "length"
