"""How long a load may make its clients wait: a limit of its own, with a time to come back that is said."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
from asgi_call import Call
from relayed import COLD, WHOLE, body, config, empty_tables, pool, publish, routed
from scripted_pool import Pool
from scripted_upstream import Upstream, answer, silent, stream

from serve_app.config import Config
from serve_app.models.replicas import PublishedModel

__all__ = ["empty_tables", "pool"]
SAID = {"choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}]}
LOADING = PublishedModel("loading", expected_wake_s=1)


def limited(limit: str, seconds: float, **router: Any) -> Config:
    """A cold model with one limit on the time of its answers."""
    plain = config(**router).model_dump()
    plain["models"][1] |= {limit: seconds}
    return Config.model_validate(plain)


@pytest.mark.case(37, 38)
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("limit", ["ttft_timeout_s", "total_timeout_s"])
async def test_load_that_takes_longer_than_an_answer_may_is_waited_for(pool: Pool, limit: str, streaming: bool) -> None:
    script = stream(WHOLE) if streaming else answer(200, SAID)
    async with Upstream(script) as upstream, routed(pool, limited(limit, 0.3)) as app:
        pool.will_be_at(upstream.url)
        call = Call(app, body(model=COLD, stream=streaming))
        await pool.called.wait()
        await asyncio.sleep(0.6)  # the load, twice as long as an answer may take
        pool.woken.set()
        assert (await call.done()).status == 200
        assert WHOLE in call.body if streaming else call.json["choices"] == SAID["choices"]


async def test_engine_that_is_late_after_its_load_is_late(pool: Pool) -> None:
    async with Upstream(silent) as upstream, routed(pool, limited("ttft_timeout_s", 0.3)) as app:
        pool.will_be_at(upstream.url)
        call = Call(app, body(model=COLD))
        await pool.called.wait()
        await asyncio.sleep(0.4)
        pool.woken.set()
        assert ((await call.done()).status, call.error["code"]) == (504, "timeout")


@pytest.mark.case(38)
async def test_openais_client_that_comes_again_joins_the_same_load(pool: Pool) -> None:
    async with Upstream(answer(200, SAID)) as upstream, routed(pool, config(hold_s=0.1)) as app:
        pool.will_be_at(upstream.url)
        publish(LOADING)
        statuses: list[int] = []

        async def seen(response: httpx.Response) -> None:
            statuses.append(response.status_code)
            if len(statuses) == 2:
                pool.woken.set()

        transport = httpx.ASGITransport(app)
        hooks = {"response": [seen]}
        async with httpx.AsyncClient(transport=transport, event_hooks=hooks) as http:
            client = openai.AsyncOpenAI(base_url="http://router/v1", api_key="none", http_client=http)
            said = await client.chat.completions.create(model=COLD, messages=[{"role": "user", "content": "hi"}])
        assert said.choices[0].message.content == "hello"
        assert statuses == [503, 503, 200]
        assert pool.asked == [COLD]


@pytest.mark.case(91)
async def test_whoever_is_held_too_long_hears_when_to_come_back_and_asks_for_one_load(pool: Pool) -> None:
    async with routed(pool, config(hold_s=0.2)) as app:
        pool.answers.append({"pending": True})
        publish(PublishedModel("stopped", place=1, expected_wake_s=7.2))
        calls = [Call(app, body(model=COLD)) for _ in range(20)]
        for call in calls:
            assert ((await call.done()).status, call.error["code"], call.headers["retry-after"]) == (
                503,
                "model_loading",
                "8",
            )
        assert pool.asked == [COLD]
