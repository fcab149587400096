"""What scripted engines are for: exact limits, faults at a chosen token, and two models with room for one."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.e2e.conftest import fake_models
from tests.e2e.service import Service, running, wait_until

pytestmark = pytest.mark.e2e
CHAT = "/v1/chat/completions"


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def _say(client: AsyncOpenAI, model: str, script: str = "", **more: Any) -> Any:
    return await client.chat.completions.create(model=model, messages=_messages(f"fake[{script}]"), **more)


@pytest.mark.case(70)
async def test_both_replicas_are_filled_to_the_last_place_and_the_next_is_refused_at_once(
    fake: Service, fake_client: AsyncOpenAI
) -> None:
    busy = [asyncio.create_task(_say(fake_client, "hot", "ttft_s=8")) for _ in range(8)]
    await asyncio.to_thread(wait_until, lambda: fake.model("hot")["in_flight"] == 8, 6, "all places are taken")
    began = time.monotonic()
    with pytest.raises(openai.InternalServerError) as refused:
        await _say(fake_client, "hot")
    assert time.monotonic() - began < 2
    assert refused.value.status_code == 503
    assert refused.value.code == "overloaded"
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert len(await asyncio.gather(*busy)) == 8
    assert (await _say(fake_client, "hot")).choices


@pytest.mark.case(19)
async def test_an_engine_that_fails_before_the_first_token_is_a_status_not_an_empty_stream(
    fake_client: AsyncOpenAI,
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as raised:
            await _say(fake_client, "hot", "fail_at=0", stream=stream)
        assert raised.value.status_code == 503


@pytest.mark.case(58)
async def test_an_engine_that_fails_later_is_an_error_event(fake_client: AsyncOpenAI) -> None:
    stream = await _say(fake_client, "hot", "fail_at=3", stream=True)
    got: list[Any] = []

    async def read() -> None:
        async for chunk in stream:
            got.append(chunk)

    with pytest.raises(openai.APIError):
        await read()
    assert got
    assert not any(choice.finish_reason for chunk in got for choice in chunk.choices)


async def test_an_engine_that_dies_is_an_error_and_its_place_is_taken_by_a_new_one(
    fake: Service, fake_client: AsyncOpenAI
) -> None:
    for script, stream in (("die_at=0", False), ("die_at=0", True)):
        with pytest.raises(openai.InternalServerError):
            await _say(fake_client, "hot", script, stream=stream)
        await asyncio.to_thread(wait_until, fake.ready, 30, "the engines are back")
    stream = await _say(fake_client, "hot", "die_at=3", stream=True)
    with pytest.raises(openai.APIError):
        async for _ in stream:
            pass
    await asyncio.to_thread(wait_until, fake.ready, 30, "the engines are back")
    assert (await _say(fake_client, "hot")).choices


@pytest.mark.case(56, 106)
async def test_events_that_arrive_in_pieces_come_out_whole(fake_client: AsyncOpenAI) -> None:
    text = "🧑‍🚀 汉字 ༼ つ ◕_◕ ༽つ 𠮷野家"
    for cut in (1, 3, 7):
        stream = await _say(fake_client, "hot", f"cut={cut},text={text}", stream=True)
        joined = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert joined == text


@pytest.mark.case(7)
async def test_a_model_in_use_is_not_evicted_and_the_next_one_waits_for_it(
    fake: Service, fake_client: AsyncOpenAI
) -> None:
    stream = await _say(fake_client, "lazy-a", "tokens=30,tpot_s=0.05", stream=True)
    first = await anext(aiter(stream))
    waiting = asyncio.create_task(_say(fake_client, "lazy-b"))
    rest = [chunk async for chunk in stream]
    assert first.choices
    assert rest[-1].choices[0].finish_reason == "stop"
    assert (await waiting).choices
    await asyncio.to_thread(fake.in_state, "lazy-a", "stopped", 5)


@pytest.mark.case(35)
async def test_two_clients_on_two_models_with_room_for_one_both_get_all_their_answers(
    fake: Service, fake_client: AsyncOpenAI
) -> None:
    before = fake.model("lazy-a")["loads"] + fake.model("lazy-b")["loads"]

    async def loop(model: str) -> int:
        done = 0
        for _ in range(10):
            done += bool((await _say(fake_client, model, "tokens=4")).choices)
        return done

    patient = fake_client.with_options(max_retries=8)
    fake_client = patient
    assert await asyncio.gather(loop("lazy-a"), loop("lazy-b")) == [10, 10]
    assert fake.model("lazy-a")["loads"] + fake.model("lazy-b")["loads"] - before <= 20


@pytest.mark.case(37)
def test_past_the_hold_limit_it_is_a_503_with_a_time_on_a_stream_too(fake: Service) -> None:
    fake.unload("lazy-a")
    fake.unload("lazy-b")
    body = {"model": "too-slow", "messages": _messages("hi")}
    status, headers, answer = fake.request(CHAT, body)
    assert status == 503
    assert answer["error"]["code"] == "model_loading"
    assert int(headers["retry-after"]) >= 1
    status, _, text = fake.request(CHAT, {**body, "stream": True})
    assert status == 200
    assert '"code":"model_loading"' in text
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.case(22, 59)
def test_a_burst_of_leavers_leaves_nothing_in_flight(fake: Service) -> None:
    async def leave() -> None:
        client = AsyncOpenAI(base_url=fake.base_url + "/v1", api_key="none", max_retries=0)
        calls = [asyncio.create_task(_say(client, "hot", "ttft_s=30", stream=index % 2 == 0)) for index in range(8)]
        await asyncio.to_thread(wait_until, lambda: fake.model("hot")["in_flight"] == 8, 10, "all are in flight")
        # Each has a hundredth of its engine's; the fuller one is shown.
        await asyncio.to_thread(wait_until, lambda: fake.model("hot")["kv_cache"] >= 0.04, 5, "they take KV cache")
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    asyncio.run(leave())
    wait_until(lambda: fake.model("hot")["in_flight"] == 0, 5, "nothing is in flight")
    wait_until(lambda: fake.model("hot")["kv_cache"] == 0, 5, "and none takes KV cache")
    assert fake.request(CHAT, {"messages": _messages("hi")})[0] == 200


@pytest.fixture(scope="module")
def interrupted() -> tuple[Any, Any]:
    """Two streams under which the service got a Ctrl-C, the second longer than the drain: their chunks, or the error.

    That no process is left, `running` sees.
    """

    async def rest(stream: Any) -> list[Any]:
        return [chunk async for chunk in stream]

    with running([fake_models()[0]], router={"drain_s": 3}) as service:

        async def scene() -> tuple[Any, Any]:
            client = AsyncOpenAI(base_url=service.base_url + "/v1", api_key="none", max_retries=0)
            short, long = [
                await _say(client, "hot", f"tokens={tokens},tpot_s=0.05", stream=True) for tokens in (30, 400)
            ]
            for stream in (long, short):
                await anext(aiter(stream))
            service.interrupt()
            return tuple(await asyncio.gather(rest(short), rest(long), return_exceptions=True))

        return asyncio.run(scene())


@pytest.mark.case(71)
def test_ctrl_c_lets_a_running_stream_finish_and_leaves_no_process(interrupted: tuple[Any, Any]) -> None:
    chunks, _ = interrupted
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_stream_that_outlasts_the_drain_ends_in_an_error_event(interrupted: tuple[Any, Any]) -> None:
    _, error = interrupted
    assert isinstance(error, openai.APIError)
    assert re.search(r"shutting down|died", str(error))


def test_a_frozen_lazy_engine_is_ended_and_its_room_given_to_the_next(fake: Service) -> None:
    assert fake.request(CHAT, {"model": "lazy-a", "messages": _messages("hi")})[0] == 200
    for host in fake.engine_processes("LazyPool"):
        host.suspend()

    def answered() -> bool:
        return fake.request(CHAT, {"model": "lazy-b", "messages": _messages("hi")})[0] == 200

    wait_until(answered, 40, "the other model got the room")


def test_a_client_that_left_the_queue_drains_nobody(fake: Service) -> None:
    async def scene() -> tuple[list[Any], int]:
        client = AsyncOpenAI(base_url=fake.base_url + "/v1", api_key="none", max_retries=0)
        stream = await _say(client, "lazy-a", "tokens=120,tpot_s=0.05", stream=True)
        # Now, with lazy-a loaded, what is published of lazy-b is newer than the tests before this one.
        loads = (await asyncio.to_thread(fake.in_state, "lazy-a", "awake")) and fake.model("lazy-b")["loads"]
        leaver = asyncio.create_task(_say(client, "lazy-b", timeout=0.5))
        chunks = [chunk async for chunk in stream]
        await asyncio.gather(leaver, return_exceptions=True)
        return chunks, loads

    chunks, loads = asyncio.run(scene())
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert fake.model("lazy-a")["state"] == "awake"
    assert fake.model("lazy-b")["loads"] == loads
