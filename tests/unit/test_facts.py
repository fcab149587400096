"""serve_app.routing.facts: what a body says, and what is wrong with it, by the field's name only."""

import copy
from typing import Any

import pytest
from catalogs import chat

from serve_app.errors import ApiError
from serve_app.routing.facts import PLAIN_ENDPOINTS, Endpoint, estimate_of, read_facts

SECRET_TEXT = "patient-4711"


def refusal(body: object, endpoint: Endpoint = "chat") -> ApiError:
    with pytest.raises(ApiError) as error:
        read_facts(body, endpoint)
    return error.value


@pytest.mark.parametrize("body", [None, [], "text", 3, True, [{"messages": []}]])
def test_body_that_is_no_object_is_a_400(body: object) -> None:
    assert refusal(body).status == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 7}, "model"),
        ({"model": ""}, "model"),
        ({"model": ["thinker"]}, "model"),
        ({"model": {"id": "thinker"}}, "model"),
        ({"stream": 1}, "stream"),
        ({"stream": "true"}, "stream"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": []}, "frequency_penalty"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"seed": 1.5}, "seed"),
        ({"stop": 3}, "stop"),
        ({"stop": ["a", 3]}, "stop"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"structured_outputs": "regex"}, "structured_outputs"),
        ({"user": {}}, "user"),
        ({"tools": {}}, "tools"),
        ({"stream_options": []}, "stream_options"),
        ({"response_format": "json"}, "response_format"),
        ({"logit_bias": []}, "logit_bias"),
        ({"chat_template_kwargs": "enable_thinking"}, "chat_template_kwargs"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"extra_body": []}, "extra_body"),
        ({"extra_body": {"temperature": "hot"}}, "temperature"),
    ],
)
def test_field_of_the_wrong_type_is_a_400_that_names_it(fields: dict[str, Any], param: str) -> None:
    error = refusal(chat(**fields))
    assert (error.status, error.param, error.code) == (400, param, "invalid_value")
    assert f"`{param}`" in error.message


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ({"role": "user", "content": "hi"}, "messages"),
        ("hi", "messages"),
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0]"),
        ([{"role": ["user"], "content": "hi"}], "messages[0]"),
        ([{"role": "user", "content": "hi"}, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "user", "content": {"type": "text", "text": "hi"}}], "messages[0].content"),
        ([{"role": "user", "content": True}], "messages[0].content"),
        ([{"role": "user", "content": ["loose"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"text": "no type"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": ["text"]}]}], "messages[0].content[1]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": {"id": "c"}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{"id": "c", "function": None}]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}], "messages[0].tool_calls[0]"),
    ],
)
def test_malformed_messages_are_a_400_that_names_the_place(messages: object, param: str) -> None:
    assert refusal({"messages": messages}).param == param


@pytest.mark.parametrize("body", [{}, {"prompt": None}, {"prompt": []}, {"prompt": 5}, {"prompt": {"a": 1}}])
def test_completion_without_a_prompt_is_a_400_that_names_it(body: dict[str, Any]) -> None:
    assert refusal(body, "completions").param == "prompt"


@pytest.mark.parametrize("prompt", ["", "hi", ["a", "b"], [1, 2, 3], [[1, 2], [3]]])
def test_every_form_of_prompt_is_taken(prompt: object) -> None:
    assert read_facts({"prompt": prompt}, "completions").body == {"prompt": prompt}


# What each endpoint that generates nothing takes, beside fields of other endpoints.
PLAIN_BODIES: dict[Endpoint, dict[str, Any]] = {
    "embeddings": {"input": ["a"], "dimensions": 8},
    "tokenize": {
        "messages": [{"role": "user", "content": 5}],
        "add_generation_prompt": False,
        "return_token_strs": None,
    },
    "detokenize": {"tokens": [0, 2**63 - 1]},
    "count_tokens": {"messages": [{"role": "user", "content": "a"}], "system": "b"},
    "score": {"text_1": {"content": [{"type": "text", "text": "a"}]}, "text_2": ["b", None]},
    "rerank": {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1},
}


def test_every_endpoint_that_generates_nothing_has_its_example() -> None:
    assert set(PLAIN_BODIES) == PLAIN_ENDPOINTS


@pytest.mark.parametrize(("endpoint", "body"), PLAIN_BODIES.items())
def test_what_generates_nothing_keeps_its_body_and_never_streams(endpoint: Endpoint, body: dict[str, Any]) -> None:
    facts = read_facts(body | {"stream": True, "model": None}, endpoint)
    assert facts.body == body | {"stream": True}
    assert (facts.model, facts.stream, facts.excerpt, facts.last_user_text) == (None, False, None, "")


@pytest.mark.parametrize("endpoint", PLAIN_BODIES)
@pytest.mark.parametrize(
    ("fields", "param"), [({"model": 7}, "model"), ({"user": {}}, "user"), ({"stream": 1}, "stream")]
)
def test_what_generates_nothing_is_held_to_the_form_of_all(
    endpoint: Endpoint, fields: dict[str, Any], param: str
) -> None:
    assert refusal(PLAIN_BODIES[endpoint] | fields, endpoint).param == param


@pytest.mark.parametrize(
    ("endpoint", "ability"),
    [
        ("chat", "chat"),
        ("responses", "chat"),
        ("messages", "chat"),
        ("count_tokens", "chat"),
        ("embeddings", "embeddings"),
        ("score", "score"),
        ("rerank", "score"),
        ("tokenize", None),
        ("detokenize", None),
    ],
)
def test_each_endpoint_names_the_ability_that_it_needs(endpoint: Endpoint, ability: str | None) -> None:
    body = chat(input="hi", tokens=[1], prompt="hi", max_tokens=1)
    assert read_facts(body, endpoint).ability == ability


@pytest.mark.parametrize(
    "body",
    [
        {"messages": SECRET_TEXT},
        {"messages": [{"role": "user", "content": {"x": SECRET_TEXT}}]},
        chat(temperature=SECRET_TEXT),
        chat(model=[SECRET_TEXT]),
        chat(extra_body=SECRET_TEXT),
        chat(stop=[SECRET_TEXT, 1]),
    ],
)
def test_refusal_never_holds_what_the_client_wrote(body: dict[str, Any]) -> None:
    assert SECRET_TEXT not in str(refusal(body).payload())


@pytest.mark.case(28)
@pytest.mark.parametrize(
    "field", ["model", "temperature", "max_tokens", "stream", "tools", "chat_template_kwargs", "seed", "mode"]
)
def test_null_means_left_out(field: str) -> None:
    assert read_facts(chat(**{field: None}), "chat") == read_facts(chat(), "chat")


def test_null_extra_body_means_left_out() -> None:
    assert read_facts(chat(extra_body=None), "chat") == read_facts(chat(), "chat")


def test_null_of_an_unknown_field_is_forwarded() -> None:
    assert read_facts(chat(vendor_field=None), "chat").body["vendor_field"] is None


def test_fields_in_a_literal_extra_body_are_fields() -> None:
    facts = read_facts(chat(extra_body={"top_k": 5, "chat_template_kwargs": {"enable_thinking": False}}), "chat")
    assert "extra_body" not in facts.body
    assert facts.body["top_k"] == 5
    assert facts.body["chat_template_kwargs"] == {"enable_thinking": False}


def test_field_beside_messages_beats_the_one_in_extra_body() -> None:
    assert read_facts(chat(top_k=1, extra_body={"top_k": 2}), "chat").body["top_k"] == 1


def test_null_beside_messages_does_not_hide_the_value_in_extra_body() -> None:
    assert read_facts(chat(top_k=None, extra_body={"top_k": 2}), "chat").body["top_k"] == 2


@pytest.mark.case(32)
def test_unknown_fields_and_history_fields_are_kept_unchanged() -> None:
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u"}}],
        },
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "r",
            "tool_calls": [
                {"id": "1", "x": None, "type": "function", "function": {"name": "f", "arguments": "{}", "y": 1}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "42", "odd": [1, {"b": None}]},
    ]
    body = {
        "messages": messages,
        "vendor": {"deep": [None, {"a": 1}]},
        "repetition_penalty": 1.05,
        "min_p": 0.0,
    }
    assert read_facts(body, "chat").body == body


def test_clients_body_is_never_changed() -> None:
    body = chat(model=None, temperature=None, extra_body={"top_k": 3})
    before = copy.deepcopy(body)
    read_facts(body, "chat")
    assert body == before


def test_max_completion_tokens_beats_the_older_max_tokens() -> None:
    assert read_facts(chat(max_tokens=5, max_completion_tokens=7), "chat").max_tokens == 7
    assert read_facts(chat(max_tokens=5, max_completion_tokens=None), "chat").max_tokens == 5


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        (None, ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([{"type": "image_url", "image_url": {"url": "u"}}], ""),
        ([{"type": "odd", "text": 7}, {"type": "odd", "text": None}], ""),
        ([], ""),
    ],
)
def test_last_user_text_is_read_from_any_form_of_content(content: object, text: str) -> None:
    messages = [
        {"role": "user", "content": "earlier"},
        {"role": "user", "content": content},
        {"role": "assistant", "content": "later"},
    ]
    assert read_facts({"messages": messages}, "chat").last_user_text == text


@pytest.mark.parametrize("value", [2**63, 2**64 - 1, -(2**63)])
def test_largest_integers_of_json_do_not_crash(value: int) -> None:
    assert refusal(chat(temperature=value)).param == "temperature"
    assert read_facts(chat(seed=value), "chat").body["seed"] == value


@pytest.mark.parametrize("endpoint", ["tokenize", "score", "rerank", "detokenize"])
def test_an_empty_list_where_no_prompt_is_checked_counts_nothing(endpoint: Endpoint) -> None:
    assert estimate_of(read_facts({"prompt": [], "messages": []}, endpoint)) == 0


def test_a_completion_of_no_token_is_taken_where_it_echoes() -> None:
    assert read_facts({"prompt": "a", "max_tokens": 0, "echo": True}, "completions").max_tokens == 0
    assert refusal({"prompt": "a", "max_tokens": 0}, "completions").param == "max_tokens"
    assert refusal(chat(max_tokens=0, echo=True)).param == "max_tokens"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "n", "seed", "thinking_token_budget"])
def test_a_whole_number_may_be_written_with_a_point(field: str) -> None:
    facts = read_facts(chat("hi", **{field: 5.0}), "chat")
    assert (facts.body[field], type(facts.body[field])) == (5, int)


@pytest.mark.parametrize("value", [5.5, 1e30, "5", True])
def test_what_is_no_whole_number_is_none_however_it_is_written(value: object) -> None:
    with pytest.raises(ApiError) as refused:
        read_facts(chat("hi", max_tokens=value), "chat")
    assert refused.value.param == "max_tokens"
