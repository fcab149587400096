"""Several replicas of one model: a conversation goes back to the one that has its beginning in its prefix cache."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asgi_call import Call
from front import front, until
from scripted_upstream import answer, silent

SAID = answer(200, {"id": "ok", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
FIRST = {"role": "user", "content": "Explain this contract to me. " * 100}
REPLY = {"role": "assistant", "content": "It says that you pay, and when. " * 50}
ON = {"router": {"prefix_affinity": True}}
OFF = {"router": {"prefix_affinity": False}}


def chat(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"model": "hot", "messages": list(messages)}


async def second_turn_meets(settings: dict[str, Any]) -> list[int]:
    """How many turns of a conversation each of two replicas got, where its first turn found the first one busy."""
    async with front(silent, SAID, **settings) as (app, (first, second)):
        busy = Call(app, chat({"role": "user", "content": "hi"}))
        await asyncio.wait_for(first.arrived.wait(), 5)
        assert (await Call(app, chat(FIRST)).done()).status == 200
        busy.disconnect()
        await busy.done()
        first.script = SAID
        assert (await Call(app, chat(FIRST, REPLY, {"role": "user", "content": "Go on."})).done()).status == 200
        return [sum(FIRST in seen.body["messages"] for seen in upstream.seen) for upstream in (first, second)]


async def test_conversation_returns_to_the_replica_that_has_its_beginning() -> None:
    assert await second_turn_meets(ON) == [0, 2]


async def test_without_affinity_it_goes_to_the_replica_with_fewer_requests() -> None:
    assert await second_turn_meets(OFF) == [1, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_crowd_with_one_beginning_does_not_stay_on_one_replica(stream: bool) -> None:
    async with front(silent, silent, **ON) as (app, upstreams):
        calls = [Call(app, {**chat(FIRST), "stream": stream}) for _ in range(12)]
        await until(lambda: sum(len(upstream.seen) for upstream in upstreams) == len(calls))
        assert all(len(upstream.seen) >= 5 for upstream in upstreams)
        for call in calls:
            call.disconnect()
            await call.done()
