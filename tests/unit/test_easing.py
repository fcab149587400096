"""What a client gets, and is told, of a model that has too much to do; and what is never changed."""

from __future__ import annotations

from typing import Any

import pytest
from asgi_call import Call
from front import HOT, Places, body, front, until

LIGHT = "light"
THINKS = {
    "thinking": {"supported": True, "default": True},
    "engine": {"reasoning_parser": "qwen3"},
    "max_ongoing_requests": 2,
}
ALWAYS_THINKS = {"shipped_rules": False, "thinking": "default"}
DEGRADE = {"degrade": {"shrink_thinking_at": 0.5, "thinking_budget": 300, "lighter_model_at": 1.0}}


async def under_load(taken: int, *, models: list[dict[str, Any]] | None = None, **fields: Any) -> tuple[Call, Any]:
    """The exchange, and the body that reached an engine, while so many of the model's two places are taken."""
    engine = Places(3)
    sections = {"model": THINKS, "router": DEGRADE, "routing": ALWAYS_THINKS, "models": models}
    async with front(engine, **sections) as (app, (upstream,)):
        busy = [Call(app, body("busy", model=HOT)) for _ in range(taken)]
        await until(lambda: engine.taken == taken)
        call = Call(app, body("asked", **fields))
        await until(lambda: engine.taken == taken + 1)
        engine.end(taken + 1)
        for each in (*busy, call):
            await each.done()
        (reached,) = [seen.body for seen in upstream.seen if seen.body["messages"][0]["content"] == "asked"]
        return call, reached


async def test_thinking_that_nobody_asked_for_is_cut_under_load_and_the_client_is_told() -> None:
    call, reached = await under_load(1)
    assert reached["thinking_token_budget"] == 300
    assert "300 tokens of thinking" in call.headers["x-router-degraded"]


async def test_without_load_nothing_is_cut_and_nothing_said() -> None:
    call, reached = await under_load(0)
    assert reached["chat_template_kwargs"]["enable_thinking"] is True
    assert "thinking_token_budget" not in reached
    assert "x-router-degraded" not in call.headers


@pytest.mark.parametrize(
    "wish", [{"thinking_token_budget": 2000}, {"reasoning_effort": "high"}, {"mode": "thinking"}], ids=str
)
async def test_thinking_that_the_client_asked_for_is_left_as_it_is(wish: dict[str, Any]) -> None:
    unloaded, plain = await under_load(0, **wish)
    loaded, reached = await under_load(2, **wish)
    assert "x-router-degraded" not in loaded.headers
    assert reached.get("thinking_token_budget") == plain.get("thinking_token_budget")
    assert unloaded.headers["x-router-thinking"] == loaded.headers["x-router-thinking"]


SMALL = [{"id": LIGHT, "tier": "resident", "source": "org/light", "context": 4096, "max_ongoing_requests": 50}]


async def test_auto_is_answered_by_a_lighter_model_when_every_place_is_taken() -> None:
    call, reached = await under_load(2, models=SMALL)
    assert (call.headers["x-router-model"], reached["model"]) == (LIGHT, LIGHT)
    assert call.headers["x-router-degraded"] == f"{HOT} is full: {LIGHT} answers"


async def test_requests_that_wait_count_as_load() -> None:
    """Every place is taken long before the mark of 1.5 is reached: it is the queue that makes up the rest."""
    engine = Places(2)
    router = {"degrade": {"lighter_model_at": 1.5}}
    async with front(engine, model={**THINKS, "queue": {"size": 9, "wait_s": 30}}, router=router, models=SMALL) as it:
        calls = [Call(it[0], body("busy", model=HOT)) for _ in range(2)]
        await until(lambda: engine.taken == 2)
        calls.append(Call(it[0], body("before it waits anybody")))
        await until(lambda: len(it[0]._lines[HOT]) == 1)
        calls.append(Call(it[0], body("after")))
        await until(lambda: len(it[0]._lines[LIGHT]) == 1)
        engine.end(4)
        assert [(await call.done()).headers["x-router-model"] for call in calls] == [HOT, HOT, HOT, LIGHT]


async def test_below_that_load_auto_stays_where_it_is() -> None:
    call, _ = await under_load(1, models=SMALL)
    assert call.headers["x-router-model"] == HOT


@pytest.mark.parametrize("named", [HOT, "nick"])
async def test_model_that_the_client_named_is_never_exchanged(named: str) -> None:
    models = [*SMALL]
    engine = Places(9)
    sections = {"model": {**THINKS, "aliases": ["nick"]}, "router": DEGRADE, "models": models}
    async with front(engine, **sections) as (app, _):
        busy = [Call(app, body("busy", model=HOT)) for _ in range(2)]
        await until(lambda: engine.taken == 2)
        call = Call(app, body(model=named))
        await until(lambda: engine.taken == 3)
        engine.end(3)
        for each in (*busy, call):
            await each.done()
    assert call.headers["x-router-model"] == HOT
    assert "x-router-degraded" not in call.headers


async def test_lighter_model_that_is_full_too_helps_nobody() -> None:
    engine = Places(9)
    small = [{**SMALL[0], "max_ongoing_requests": 1}]
    async with front(engine, model=THINKS, router=DEGRADE, models=small) as (app, _):
        # Both are on one replica here, whose requests count for both.
        busy = [Call(app, body("busy", model=HOT)) for _ in range(2)]
        await until(lambda: engine.taken == 2)
        call = Call(app, body())
        await until(lambda: engine.taken == 3)
        engine.end(3)
        for each in (*busy, call):
            await each.done()
    assert call.headers["x-router-model"] == HOT
