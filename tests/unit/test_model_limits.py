"""Limits of models and of keys on what may be asked: sizes of prompts and answers, and which models."""

from __future__ import annotations

from typing import Any

import pytest
from asgi_call import Call
from front import HOT, body, by, front, key, settings
from scripted_upstream import answer

OK = answer(200, {"choices": []})
LORA = "hot-lora"
ADAPTER = {"id": LORA, "aliases": ["tuned"], "tier": "resident", "base": HOT, "adapter": "org/lora", "context": 4096}
OTHER = {"id": "other", "tier": "resident", "source": "org/other", "context": 4096}


async def asked(*, model: dict[str, Any], path: str = "/v1/chat/completions", **fields: Any) -> tuple[Call, Any]:
    async with front(OK, model=model) as (app, (upstream,)):
        call = await Call(app, fields, path=path).done()
        return call, upstream.seen[0].body if upstream.seen else None


@pytest.mark.parametrize(
    "fields",
    [
        {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": "word " * 500}]},
        {"path": "/v1/completions", "prompt": "word " * 500},
        {"path": "/v1/responses", "input": "word " * 500},
    ],
    ids=["chat", "completions", "responses"],
)
async def test_prompt_that_is_too_long_is_a_400_and_reaches_no_engine(fields: dict[str, Any]) -> None:
    call, reached = await asked(model={"max_prompt_tokens": 100}, **fields)
    assert (call.status, call.error["code"], reached) == (400, "context_length_exceeded", None)
    assert "100" in call.error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_prompt_within_the_limit_is_answered(path: str) -> None:
    fields = body("word " * 50) if "chat" in path else {"prompt": "word " * 50}
    assert (await asked(model={"max_prompt_tokens": 100}, path=path, **fields))[0].status == 200


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_answer_that_is_asked_too_long_is_a_400(field: str) -> None:
    call, reached = await asked(model={"max_answer_tokens": 50}, **body(**{field: 51}))
    assert (call.status, reached) == (400, None)
    assert (await asked(model={"max_answer_tokens": 50}, **body(**{field: 50})))[0].status == 200


CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"prompt_logprobs": -1, "top_logprobs": 20, "logprobs": True}),
        (CHAT, {"prompt_logprobs": 21}),
        (CHAT, {"logprobs": True, "top_logprobs": 21}),
        (CHAT, {"logprobs": True, "top_logprobs": -1}),
        (CHAT, {"logprobs": True, "top_logprobs": "20"}),
        (CHAT, {"n": 129}),
        (CHAT, {"best_of": 129}),
        (COMPLETION, {"logprobs": -1}),
        (COMPLETION, {"logprobs": 21}),
        (COMPLETION, {"prompt_logprobs": 10**9}),
        (COMPLETION, {"best_of": 1000, "n": 1}),
        (COMPLETION, {"n": 10**9}),
    ],
)
async def test_alternatives_and_choices_that_would_take_gigabytes_are_a_400(path: str, fields: dict[str, Any]) -> None:
    # Whatever its operator lets the engine do.
    asks = body("tea " * 1000, **fields) if path == CHAT else {"prompt": "tea", **fields}
    call, reached = await asked(model={"engine": {"max_logprobs": -1}}, path=path, **asks)
    assert (call.status, call.error["param"] in fields, reached) == (400, True, None)


async def test_as_many_alternatives_as_the_model_allows_are_answered() -> None:
    for path, asks in ((CHAT, body(logprobs=True, top_logprobs=20)), (COMPLETION, {"prompt": "x", "logprobs": 20})):
        assert (await asked(model={}, path=path, **asks))[0].status == 200
    more = body(logprobs=True, top_logprobs=21)
    assert (await asked(model={"max_logprobs": 50}, **more))[0].status == 200
    assert (await asked(model={"max_logprobs": 5}, **body(logprobs=True, top_logprobs=6)))[0].status == 400


def test_what_the_router_allows_the_engine_is_started_for() -> None:
    lifted = settings({"max_logprobs": 50})
    assert lifted.engine_spec(lifted.models[0]).args["max_logprobs"] == 50
    usual = settings()
    assert "max_logprobs" not in usual.engine_spec(usual.models[0]).args


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/v1/chat/completions", body(), "max_tokens"),
        ("/v1/completions", {"prompt": "hi"}, "max_tokens"),
        ("/v1/responses", {"input": "hi"}, "max_output_tokens"),
    ],
)
async def test_answer_of_no_given_length_is_held_to_the_limit(path: str, fields: dict[str, Any], name: str) -> None:
    call, reached = await asked(model={"max_answer_tokens": 50}, path=path, **fields)
    assert (call.status, reached[name]) == (200, 50)


async def test_long_prompt_does_not_shrink_its_answer_to_a_token() -> None:
    """By estimate it may fill the context; the engine knows how much is left, and that is below the limit anyway."""
    call, reached = await asked(model={"context": 512, "max_answer_tokens": 500}, **body("word " * 330))
    assert call.status == 200
    assert "max_tokens" not in reached


async def test_long_prompt_of_a_completion_leaves_room_for_its_answer() -> None:
    fields = {"path": "/v1/completions", "prompt": "word " * 200}
    call, reached = await asked(model={"context": 512, "max_answer_tokens": 500}, **fields)
    assert call.status == 200
    assert 16 <= reached["max_tokens"] <= 312


@pytest.mark.parametrize("prompt", [[1] * 101, [[1] * 5, [2] * 101], ["hi", "word " * 500]], ids=["a", "b", "c"])
async def test_prompts_in_tokens_and_in_lists_are_held_to_the_limit_each(prompt: list[Any]) -> None:
    call, reached = await asked(model={"max_prompt_tokens": 100}, path="/v1/completions", prompt=prompt)
    assert (call.status, call.error["param"], reached) == (400, "prompt", None)


@pytest.mark.parametrize("prompt", [[1] * 100, [[1] * 60, [2] * 60], ["word"] * 200, [None, {"a": 1}, 1.5]], ids=str)
async def test_prompts_within_the_limit_and_odd_ones_are_left_to_the_engine(prompt: list[Any]) -> None:
    assert (await asked(model={"max_prompt_tokens": 100}, path="/v1/completions", prompt=prompt))[0].status == 200


SCORES = {"abilities": ["score"], "max_prompt_tokens": 100}
LONG, SHORT = "word " * 120, "word " * 30


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        ("/v1/rerank", {"query": SHORT, "documents": [SHORT, LONG]}, 400),
        ("/v1/rerank", {"query": LONG, "documents": ["a"]}, 400),
        ("/v1/rerank", {"query": SHORT, "documents": [SHORT] * 9}, 200),
        ("/v1/score", {"text_1": [SHORT, LONG], "text_2": ["a", "b"]}, 400),
        ("/v1/score", {"queries": SHORT, "documents": {"content": [{"type": "text", "text": LONG}]}}, 400),
        ("/v1/score", {"data_1": [SHORT, SHORT], "data_2": [SHORT, SHORT]}, 200),
    ],
)
async def test_each_pair_that_is_scored_is_held_to_the_limit(path: str, fields: dict[str, Any], status: int) -> None:
    assert (await asked(model=SCORES, path=path, **fields))[0].status == status


@pytest.mark.parametrize(("path", "fields"), [("/tokenize", {"prompt": LONG}), ("/detokenize", {"tokens": [1] * 999})])
async def test_how_long_a_prompt_is_may_be_asked_whatever_the_limit(path: str, fields: dict[str, Any]) -> None:
    assert (await asked(model={"max_prompt_tokens": 100}, path=path, **fields))[0].status == 200


# Which models a key may use


async def by_key(models: list[str] | None, **fields: Any) -> tuple[Call, set[str], Any]:
    """An exchange with such a key, what it sees listed, and what reached the engine."""
    keys = {"security": {"keys": [key("k", models=models)]}}
    async with front(OK, models=[ADAPTER, OTHER], **keys) as (app, (upstream,)):
        call = await Call(app, body(**fields), headers=by("k")).done()
        listed = await Call(app, path="/v1/models", method="GET", headers=by("k")).done()
        seen = {card["id"] for card in listed.json["data"]}
        return call, seen, upstream.seen[0].body["model"] if upstream.seen else None


async def test_key_without_a_list_may_use_every_model() -> None:
    call, seen, reached = await by_key(None, model="other")
    assert (call.status, seen, reached) == (200, {HOT, LORA, "other", "auto"}, "other")


@pytest.mark.parametrize("named", [LORA, "tuned"])
async def test_key_for_an_adapter_may_use_it_and_not_its_base(named: str) -> None:
    call, seen, reached = await by_key([LORA], model=named)
    assert (call.status, seen, reached) == (200, {LORA, "auto"}, LORA)
    call, _, reached = await by_key([LORA], model=HOT)
    assert (call.status, reached) == (404, None)


async def test_key_for_a_base_may_not_use_its_adapter() -> None:
    call, seen, reached = await by_key([HOT], model=LORA)
    assert (call.status, seen, reached) == (404, {HOT, "auto"}, None)


@pytest.mark.parametrize("name", ["other", LORA])
async def test_auto_chooses_among_the_models_of_the_key(name: str) -> None:
    call, seen, reached = await by_key([name])
    assert (call.status, seen, reached) == (200, {name, "auto"}, name)


async def test_model_of_others_is_as_unknown_as_one_that_does_not_exist() -> None:
    hidden, _, _ = await by_key(["other"], model=HOT)
    unknown, _, _ = await by_key(["other"], model="nope")
    assert hidden.error == unknown.error
