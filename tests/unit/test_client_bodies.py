"""Field cases of bodies: what clients send, as an engine gets it through the whole router."""

from __future__ import annotations

from typing import Any

import pytest
from asgi_call import Call
from front import HOT, body, front
from scripted_upstream import answer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
THINKER = {"aliases": ["big"], "thinking": {"supported": True}, "engine": {"reasoning_parser": "qwen3"}}
OK = answer(200, {"id": "ok", "choices": []})
NULLS = [
    "stop",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "n",
    "seed",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "stream",
    "stream_options",
    "user",
    "reasoning_effort",
    "chat_template_kwargs",
]


async def engine_got(sent: dict[str, Any], path: str = CHAT, model: dict[str, Any] | None = None) -> dict[str, Any]:
    """What the engine is asked for."""
    async with front(OK, model=model or THINKER) as (app, (upstream,)):
        call = await Call(app, sent, path=path).done()
        assert call.status == 200, call.body
        return dict(upstream.seen[0].body)


async def refused(sent: Any, path: str = CHAT) -> Call:
    """An answer in OpenAI's shape to what no engine gets."""
    async with front(OK, model=THINKER) as (app, (upstream,)):
        call = await Call(app, sent, path=path).done()
        assert upstream.seen == []
        assert call.error["type"] == "invalid_request_error"
        return call


@pytest.mark.case(1)
@pytest.mark.parametrize("name", [{"model": "auto"}, {}, {"model": HOT}, {"model": "big"}], ids=str)
async def test_not_thinking_is_said_to_the_engine_in_so_many_words(name: dict[str, str]) -> None:
    asked = body("What is the capital of France? One word.", max_tokens=64, **name)
    assert (await engine_got(asked))["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.case(2)
@pytest.mark.parametrize("wanted", [True, False])
async def test_the_clients_choice_and_fields_of_vllm_arrive_as_they_were_after_the_model_is_rewritten(
    wanted: bool,
) -> None:
    fields = {"top_k": 20, "min_p": 0.0, "repetition_penalty": 1.05, "vendor": {"a": [1, 1.0, None, "ü"]}}
    kwargs = {"enable_thinking": wanted, "custom": 3}
    got = await engine_got(body("Is 91 prime?", model="auto", chat_template_kwargs=kwargs, **fields))
    assert {name: got[name] for name in fields} == fields
    assert type(got["min_p"]) is float
    assert (got["model"], got["chat_template_kwargs"]) == (HOT, kwargs)


@pytest.mark.case(17)
@pytest.mark.parametrize("effort", ["none", "low", "high"])
async def test_an_alias_its_id_and_auto_think_alike(effort: str) -> None:
    asked = [body("Prove it.", model=name, reasoning_effort=effort) for name in ("big", HOT, "auto")]
    first, *others = [await engine_got(each) for each in asked]
    assert first["chat_template_kwargs"]["enable_thinking"] is (effort != "none")
    assert others == [first, first]


@pytest.mark.case(17, 29)
def test_a_model_that_thinks_and_has_no_parser_does_not_start() -> None:
    from front import settings

    with pytest.raises(ValueError, match="reasoning_parser"):
        settings({"thinking": {"supported": True}})
    with pytest.raises(ValueError, match="efforts"):
        settings({**THINKER, "thinking": {"supported": True, "efforts": {"high": "much"}}})


@pytest.mark.case(28)
async def test_a_body_full_of_nulls_is_the_body_without_them() -> None:
    assert await engine_got(body(**dict.fromkeys(NULLS))) == await engine_got(body())
    assert await engine_got({"prompt": "hi", **dict.fromkeys(NULLS)}, COMPLETIONS) == await engine_got(
        {"prompt": "hi"}, COMPLETIONS
    )


@pytest.mark.case(32)
async def test_history_and_unknown_fields_reach_the_engine() -> None:
    reply = {"role": "assistant", "content": "4", "reasoning_content": "simple sum", "vendor": [1]}
    messages = [{"role": "user", "content": "2+2?"}, reply, {"role": "user", "content": "and 3 more?"}]
    got = await engine_got({"messages": messages, "x_unknown": {"a": 1}})
    assert (got["messages"], got["x_unknown"]) == (messages, {"a": 1})


@pytest.mark.case(46)
async def test_an_answer_of_the_routers_own_is_taken_back_as_history() -> None:
    message = {"role": "assistant", "content": "hello", "reasoning": None, "tool_calls": []}
    said = answer(200, {"id": "x", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
    async with front(said, model=THINKER) as (app, (upstream,)):
        first = (await Call(app, body()).done()).json["choices"][0]["message"]
        first |= {"function_call": None, "refusal": None, "audio": None, "annotations": []}
        messages = [{"role": "user", "content": "hi"}, first, {"role": "user", "content": "again"}]
        assert (await Call(app, {"messages": messages}).done()).status == 200
        got = upstream.seen[1].body["messages"][1]
        assert not {"tool_calls", "function_call", "refusal", "audio", "annotations"} & set(got)


@pytest.mark.case(97, 98)
@pytest.mark.parametrize(
    "nothing",
    [{"tool_choice": "none"}, {"tool_choice": "auto"}, {"tools": None, "tool_choice": "auto"}, {"tools": []}],
    ids=str,
)
async def test_no_tools_are_no_tools_however_that_is_said(nothing: dict[str, Any]) -> None:
    assert await engine_got(body("poem", **nothing)) == await engine_got(body("poem"))


@pytest.mark.case(119)
@pytest.mark.parametrize("fields", [{}, {"stream": True}], ids=str)
async def test_no_limit_is_made_up_where_the_client_named_none(fields: dict[str, bool]) -> None:
    async with front(OK) as (app, (upstream,)):
        await Call(app, body("Where do llamas come from?", **fields)).done()
        assert not {"max_tokens", "max_completion_tokens"} & set(upstream.seen[0].body)


@pytest.mark.case(4, 14)
@pytest.mark.parametrize(
    ("wrong", "status", "param", "code"),
    [
        ({"model": "nope", "messages": body()["messages"]}, 404, "model", "model_not_found"),
        ({"messages": {"role": "user", "content": "hi"}}, 400, "messages", "invalid_value"),
        (b"{not json", 400, None, "invalid_json"),
        (body(temperature="hot"), 400, "temperature", "invalid_value"),
        (body(model=""), 400, "model", "invalid_value"),
        (body(model=7), 400, "model", "invalid_value"),
        (body(model=["hot"]), 400, "model", "invalid_value"),
    ],
)
async def test_an_error_has_openais_fields_and_names_the_field_that_is_wrong(
    wrong: Any, status: int, param: str | None, code: str
) -> None:
    call = await refused(wrong)
    assert (call.status, call.error["param"], call.error["code"]) == (status, param, code)
    assert "hot" not in call.error["message"].split()


@pytest.mark.case(14)
@pytest.mark.parametrize("fields", [{}, {"model": None}], ids=str)
async def test_no_model_is_the_default_one(fields: dict[str, None]) -> None:
    assert (await engine_got(body(**fields)))["model"] == HOT


@pytest.mark.case(52)
@pytest.mark.parametrize("url", ["data:image/png;base64,iVBORw0KGgo=", "http://media.invalid/cat.png"])
@pytest.mark.parametrize("named", [{}, {"model": "auto"}, {"model": HOT}], ids=str)
async def test_an_image_for_a_model_without_eyes_is_refused_with_the_reason(url: str, named: dict[str, str]) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    call = await refused({"messages": [{"role": "user", "content": parts}], **named})
    assert (call.status, call.error["code"]) == (400, "unsupported_content")
    assert "image" in call.error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.1"}}, "kv_transfer_params"),
        ({"ec_transfer_params": {"peer": "10.0.0.1"}}, "ec_transfer_params"),
        ({"vllm_xargs": {"kv_transfer_params": "xyzzy"}}, "vllm_xargs"),
        ({"vllm_xargs": "xyzzy"}, "vllm_xargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "{{ messages }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"conversation": [["xyzzy"]]}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"return_tensors": "pt"}}, "chat_template_kwargs"),
    ],
)
async def test_what_engines_tell_each_other_or_their_renderers_is_no_clients_to_say(
    path: str, fields: dict[str, Any], param: str
) -> None:
    """vLLM would fetch a KV cache from there; a text for one is a 500, which reads as: try again."""
    text = {"prompt": "hi"} if path == "/v1/completions" else {"input": "hi"}
    said = {"messages": body()["messages"]} if path == "/v1/chat/completions" else text
    async with front(OK) as (app, (upstream,)):
        call = await Call(app, {**said, **fields}, path=path).done()
        assert (call.status, call.json["error"]["param"]) == (400, param)
        assert "xyzzy" not in call.json["error"]["message"]
        assert upstream.seen == []


async def test_variables_of_a_template_and_null_pass() -> None:
    async with front(OK) as (app, (upstream,)):
        extra = {"vllm_xargs": {"a": 1}, "kv_transfer_params": None, "chat_template_kwargs": {"add_vision_id": True}}
        call = await Call(app, body(**extra)).done()
        assert call.status == 200, call.body
        assert upstream.seen[0].body["vllm_xargs"] == {"a": 1}
