"""One set of behaviours for every engine: the scripted one and vLLM itself, each in a host process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio

from serve_app.engines.base import REFUSAL_HEADER, SECRET_HEADER, EngineError, EngineLoad, EngineSpec, Phase
from serve_app.engines.port import reserve_port
from serve_app.engines.process import EngineProcess, StandbyHost
from serve_app.model_schema import Model
from serve_app.router.tokens import TokenCounter
from tests.cores import ENGINE_CORES

MODELS_DIR = Path(os.environ.get("MODELS_DIR") or Path(__file__).resolve().parents[2] / ".models").absolute()
SECRET = "contract"
PLACES = 3
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"

SPECS = {
    "fake": EngineSpec("m", "fake", "", {"tokens": 2000, "tpot_s": 0.005, "context": 1024, "kv_places": 8}, {}, PLACES),
    "vllm": EngineSpec(
        "m",
        "vllm",
        str(MODELS_DIR / "smollm2-135m-instruct"),
        {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 8},
        {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", **ENGINE_CORES},
        PLACES,
        load_timeout_s=120,
    ),
}
BROKEN = {
    "fake": EngineSpec("m", "fake", "", {"fail_load": "no such weights"}, {}, PLACES),
    "vllm": EngineSpec("m", "vllm", "/no/such/model", {}, {"HF_HUB_OFFLINE": "1"}, PLACES, load_timeout_s=120),
}
KINDS = ["fake", pytest.param("vllm", marks=pytest.mark.real_engine)]
pytestmark = pytest.mark.asyncio(loop_scope="module")


@contextlib.asynccontextmanager
async def started(kind: str) -> AsyncIterator[EngineProcess]:
    async with running(SPECS[kind]) as engine:
        yield engine


@contextlib.asynccontextmanager
async def running(spec: EngineSpec) -> AsyncIterator[EngineProcess]:
    address, port = reserve_port("127.0.0.1")
    engine = EngineProcess(spec, address, secret=SECRET)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop(2)
        port.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[EngineProcess]:
    async with started(request.param) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(engine: EngineProcess) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(engine.address.url, headers={SECRET_HEADER: SECRET}) as session:
        yield session


def body(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    return {"model": "m", "messages": messages, "max_tokens": 12, "temperature": 0, **more}


def events(text: str) -> list[dict[str, Any]]:
    """The JSON events of an SSE body, which must be whole and end with [DONE]."""
    parts = text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 # a count of another process
            await asyncio.sleep(0.02)


async def until_in_flight(engine: EngineProcess, count: int) -> None:
    await until(lambda: engine.in_flight == count)


async def test_a_ready_engine_answers_and_counts_its_tokens(engine: EngineProcess, http: aiohttp.ClientSession) -> None:
    assert engine.phase is Phase.READY
    async with http.post(CHAT, json=body()) as answer:
        assert answer.status == 200
        whole = await answer.json()
    usage = whole["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert whole["model"] == "m"
    assert engine.memory_bytes() > 10_000_000


async def test_a_stream_joins_to_the_plain_answer(engine: EngineProcess, http: aiohttp.ClientSession) -> None:
    async with http.post(CHAT, json=body()) as answer:
        plain = (await answer.json())["choices"][0]
    async with http.post(CHAT, json=body(stream=True, stream_options={"include_usage": True})) as answer:
        assert answer.content_type == "text/event-stream"
        chunks = events(await answer.text())
    deltas = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert "".join(delta["delta"].get("content") or "" for delta in deltas) == plain["message"]["content"]
    assert deltas[-1]["finish_reason"] == plain["finish_reason"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] >= 1


async def test_the_limit_is_exact_and_a_place_is_free_when_its_client_has_left(
    engine: EngineProcess, http: aiohttp.ClientSession
) -> None:
    long = body(max_tokens=900, ignore_eos=True, stream=True)
    streams = [await http.post(CHAT, json=long) for _ in range(PLACES)]
    assert [stream.status for stream in streams] == [200] * PLACES
    refused = await http.post(CHAT, json=body())
    assert refused.status == 503
    assert refused.headers[REFUSAL_HEADER] == "full"
    async with http.get("/health") as healthy:
        assert healthy.status == 200
    await until_in_flight(engine, PLACES)
    for stream in streams:
        stream.close()
    await until_in_flight(engine, 0)
    async with http.post(CHAT, json=body()) as answer:
        assert answer.status == 200


async def test_what_the_scheduler_does_is_told_and_is_nothing_when_it_has_nothing_to_do(
    engine: EngineProcess, http: aiohttp.ClientSession
) -> None:
    long = body(max_tokens=900, ignore_eos=True, stream=True)
    streams = [await http.post(CHAT, json=long) for _ in range(2)]
    await until(lambda: (engine.reported.running, engine.reported.waiting) == (2, 0))
    assert 0 < engine.reported.kv_cache < 1
    for stream in streams:
        stream.close()
    await until(lambda: engine.reported == EngineLoad())


@pytest.mark.parametrize("engine", [pytest.param("vllm", marks=pytest.mark.real_engine)], indirect=True)
@pytest.mark.parametrize("text", ["What is 12345 + 678?", "你好, how are you?", "  \n\n  x  " * 40])
async def test_a_prompt_has_as_many_tokens_as_the_router_counts(http: aiohttp.ClientSession, text: str) -> None:
    source = str(MODELS_DIR / "smollm2-135m-instruct")
    model = Model.model_validate({"id": "m", "tier": "resident", "source": source, "context": 1024})
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "Hm."}, *body()["messages"]]
    async with http.post(CHAT, json=body(messages=messages)) as answer:
        usage = (await answer.json())["usage"]
    assert await TokenCounter("").count(model, {"messages": messages}) == usage["prompt_tokens"]
    async with http.post("/v1/completions", json={"model": "m", "prompt": text, "max_tokens": 1}) as answer:
        usage = (await answer.json())["usage"]
    assert await TokenCounter("").longest(model, [text]) == usage["prompt_tokens"]


async def test_a_plain_request_ends_when_its_client_leaves(engine: EngineProcess, http: aiohttp.ClientSession) -> None:
    request = asyncio.create_task(http.post(CHAT, json=body(max_tokens=900, ignore_eos=True)))
    await until_in_flight(engine, 1)
    request.cancel()
    async with asyncio.timeout(1.5):
        await until_in_flight(engine, 0)


async def test_it_does_not_close_while_in_use(engine: EngineProcess, http: aiohttp.ClientSession) -> None:
    async with http.post(CHAT, json=body(max_tokens=900, ignore_eos=True, stream=True)):
        assert not await engine.close_if_idle()
    await until_in_flight(engine, 0)
    async with http.post(CHAT, json=body()) as answer:
        assert answer.status == 200


async def test_only_the_router_gets_in_and_only_to_the_api(engine: EngineProcess, http: aiohttp.ClientSession) -> None:
    async with http.post(CHAT, json=body(), headers={SECRET_HEADER: "wrong"}) as answer:
        assert answer.status == 403
    async with http.get("/metrics", headers={SECRET_HEADER: "wrong"}) as answer:
        assert answer.status == 403
    for path in ("/docs", "/sleep", "/invocations", "/v1/load_lora_adapter", "/openapi.json"):
        async with http.get(path) as answer:
            assert answer.status == 404


MESSAGE_STOP = 'event: message_stop\ndata: {"type":"message_stop"}'


async def test_messages_are_answered_in_anthropics_form_and_a_stream_ends_as_a_router_expects(
    engine: EngineProcess, http: aiohttp.ClientSession
) -> None:
    async with http.post(MESSAGES, json=body(max_tokens=3)) as answer:
        whole = await answer.json()
    assert (whole["type"], whole["content"][0]["type"], whole["stop_reason"]) == ("message", "text", "max_tokens")
    async with http.post(MESSAGES, json=body(max_tokens=3, stream=True)) as answer:
        *parts, rest = (await answer.text()).split("\n\n")
    assert (parts[-1], rest) == (MESSAGE_STOP, "")
    sent = [json.loads(part.partition("\ndata: ")[2]) for part in parts]
    assert (sent[0]["type"], sent[-2]["type"]) == ("message_start", "message_delta")
    assert sent[-2]["usage"] == whole["usage"]
    texts = [one["delta"]["text"] for one in sent if one.get("delta", {}).get("type") == "text_delta"]
    assert "".join(texts) == whole["content"][0]["text"]
    async with http.post(f"{MESSAGES}/count_tokens", json=body()) as answer:
        assert (await answer.json())["input_tokens"] == whole["usage"]["input_tokens"]


@pytest.mark.case(5)
async def test_more_than_the_context_is_a_400_before_a_stream_begins(
    engine: EngineProcess, http: aiohttp.ClientSession
) -> None:
    for stream in (False, True):
        async with http.post(CHAT, json=body(max_tokens=5000, stream=stream)) as answer:
            assert answer.status == 400
            assert "1024" in (await answer.json())["error"]["message"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_model_that_cannot_start_says_why_and_leaves_nothing(kind: str) -> None:
    address, port = reserve_port("127.0.0.1")
    engine = EngineProcess(BROKEN[kind], address, secret=SECRET)
    with pytest.raises(EngineError, match=r"m could not start: .*such"):
        await engine.start()
    assert engine.memory_bytes() == 0
    port.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_drain_finishes_what_runs_and_stop_gives_all_memory_back(kind: str) -> None:
    async with started(kind) as engine:
        assert engine.pid
        family = [psutil.Process(engine.pid), *psutil.Process(engine.pid).children(recursive=True)]
        async with aiohttp.ClientSession(engine.address.url, headers={SECRET_HEADER: SECRET}) as session:
            async with session.post(CHAT, json=body(max_tokens=60, ignore_eos=True, stream=True)) as stream:
                drained = asyncio.create_task(engine.drain(30))
                chunks = events(await stream.text())
            assert chunks[-1]["choices"][0]["finish_reason"]
            assert await drained
            refused = await session.post(CHAT, json=body())
            assert refused.headers[REFUSAL_HEADER] == "closed"
        await engine.stop()
        assert engine.memory_bytes() == 0
        assert not any(process.is_running() and process.status() != "zombie" for process in family)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_killed_engine_is_noticed_and_takes_its_children_along(kind: str) -> None:
    async with started(kind) as engine:
        assert engine.pid
        children = psutil.Process(engine.pid).children(recursive=True)
        psutil.Process(engine.pid).kill()
        async with asyncio.timeout(5):
            assert "SIGKILL" in await engine.wait_exit()
        _, left = psutil.wait_procs(children, timeout=5)
        assert not left


STALL_S = 2.0


async def test_an_engine_that_hangs_with_requests_is_ended_though_its_server_answers() -> None:
    spec = dataclasses.replace(SPECS["fake"], stall_timeout_s=STALL_S)
    async with running(spec) as engine, aiohttp.ClientSession(headers={SECRET_HEADER: SECRET}) as session:
        wedging = body(max_tokens=100)
        wedging["messages"][0]["content"] = "fake[wedge_at=3]"
        asking = asyncio.ensure_future(session.post(engine.address.url + CHAT, json=wedging))
        await until_in_flight(engine, 1)
        async with session.get(engine.address.url + "/health") as health:
            assert health.status == 200
        async with asyncio.timeout(10):
            assert "it hung: 1 requests and no step for 2 s" in await engine.wait_exit()
        with pytest.raises(aiohttp.ClientError):
            await asking


@pytest.mark.case(26)
async def test_an_engine_whose_requests_are_slow_is_left_alone() -> None:
    spec = dataclasses.replace(SPECS["fake"], stall_timeout_s=STALL_S)
    async with running(spec) as engine, aiohttp.ClientSession(headers={SECRET_HEADER: SECRET}) as session:
        slow = body(max_tokens=2)
        slow["messages"][0]["content"] = f"fake[ttft_s={2 * STALL_S}]"
        async with session.post(engine.address.url + CHAT, json=slow) as answer:
            assert answer.status == 200
        assert engine.phase is Phase.READY


@pytest.mark.real_engine
async def test_vllms_core_that_hangs_is_noticed_by_its_steps() -> None:
    spec = dataclasses.replace(SPECS["vllm"], stall_timeout_s=STALL_S)
    async with running(spec) as engine, aiohttp.ClientSession(headers={SECRET_HEADER: SECRET}) as session:
        async with session.post(engine.address.url + CHAT, json=body()) as answer:
            assert answer.status == 200
        assert engine.pid
        (core,) = [
            child for child in psutil.Process(engine.pid).children() if "EngineCore" in " ".join(child.cmdline())
        ]
        core.suspend()
        asking = asyncio.ensure_future(session.post(engine.address.url + CHAT, json=body()))
        async with asyncio.timeout(15):
            assert "it hung" in await engine.wait_exit()
        with pytest.raises(aiohttp.ClientError):
            await asking


async def test_a_standby_host_that_died_is_replaced_by_a_new_one() -> None:
    standby = await StandbyHost.spawn("fake", "warning")
    await standby.ready.wait()
    standby.process.kill()
    address, port = reserve_port("127.0.0.1")
    engine = EngineProcess(SPECS["fake"], address, secret=SECRET, standby=standby)
    await engine.start()
    assert engine.phase is Phase.READY
    await engine.stop()
    port.close()


async def test_a_load_that_hangs_is_ended_at_its_deadline() -> None:
    address, port = reserve_port("127.0.0.1")
    spec = EngineSpec("m", "fake", "", {"hang_load": True}, {}, PLACES, load_timeout_s=0.5)
    engine = EngineProcess(spec, address, secret=SECRET)
    with pytest.raises(EngineError, match=r"not ready after 0.5 s; it was loading"):
        await engine.start()
    assert engine.memory_bytes() == 0
    port.close()


# Sleep. vLLM can on GPUs only, so it is the scripted engine that does here.


def sleeper(**script: Any) -> EngineSpec:
    """A scripted engine that gives up falling asleep or waking after half a second."""
    return EngineSpec("m", "fake", "", {"tokens": 3, **script}, {}, PLACES, steer_timeout_s=0.5)


async def asked(engine: EngineProcess) -> tuple[int, str | None]:
    """The status of a small request, and the refusal where it is one."""
    async with (
        aiohttp.ClientSession(engine.address.url, headers={SECRET_HEADER: SECRET}) as session,
        session.post(CHAT, json=body()) as answer,
    ):
        return answer.status, answer.headers.get(REFUSAL_HEADER)


@pytest.mark.parametrize("level", [1, 2])
async def test_an_engine_asleep_has_given_its_memory_back_and_answers_again_when_it_is_woken(level: int) -> None:
    async with running(sleeper(memory_mb=200)) as engine:
        awake = engine.memory_bytes()
        assert await engine.close_if_idle()
        await engine.sleep(level)
        assert engine.phase is Phase.ASLEEP
        assert engine.memory_bytes() < awake - 150_000_000
        assert await asked(engine) == (503, "closed")
        await engine.wake()
        assert engine.phase is Phase.READY
        assert engine.memory_bytes() > awake - 50_000_000
        assert await asked(engine) == (200, None)


async def test_what_an_engine_has_served_is_known_exactly_once_it_is_closed() -> None:
    async with running(sleeper()) as engine:
        for count in range(1, 4):
            assert await asked(engine) == (200, None)
            assert await engine.close_if_idle()
            assert engine.served == count
            await engine.sleep(1)
            await engine.wake()
            assert (engine.served, engine.in_flight) == (count, 0)


@pytest.mark.parametrize("command", ["sleep", "wake"])
async def test_an_engine_that_hangs_falling_asleep_or_waking_is_ended(command: str) -> None:
    async with running(sleeper(**{f"hang_{command}": True})) as engine:
        assert await engine.close_if_idle()
        with pytest.raises(EngineError, match=rf"m: {command} ended it: it hung: .* `{command}` for 0.5 s"):
            await steered_to(engine, command)
        assert engine.phase is Phase.STOPPED
        assert engine.memory_bytes() == 0
        assert "it hung" in await engine.wait_exit()


@pytest.mark.parametrize("command", ["sleep", "wake"])
async def test_an_engine_that_fails_to_sleep_or_wake_says_why_and_can_be_stopped(command: str) -> None:
    async with running(sleeper(**{f"fail_{command}": "no room"})) as engine:
        assert await engine.close_if_idle()
        with pytest.raises(EngineError, match=rf"m: {command} failed: RuntimeError: no room"):
            await steered_to(engine, command)
        assert await asked(engine) == (503, "closed")
        await engine.stop(2)
        assert (engine.phase, engine.memory_bytes()) == (Phase.STOPPED, 0)


async def steered_to(engine: EngineProcess, command: str) -> None:
    await engine.sleep(1)
    if command == "wake":
        await engine.wake()


async def test_an_engine_killed_asleep_is_noticed_and_cannot_be_woken() -> None:
    async with running(sleeper()) as engine:
        assert await engine.close_if_idle()
        await engine.sleep(1)
        engine.kill()
        async with asyncio.timeout(5):
            assert "SIGKILL" in await engine.wait_exit()
        with pytest.raises(EngineError, match=r"m is not asleep"):
            await engine.wake()


async def test_an_engine_that_is_not_up_does_not_sleep_and_one_that_does_not_sleep_does_not_wake() -> None:
    async with running(sleeper()) as engine:
        with pytest.raises(EngineError, match=r"m is not asleep"):
            await engine.wake()
        assert await asked(engine) == (200, None)
        await engine.stop(2)
        with pytest.raises(EngineError, match=r"m is not running"):
            await engine.sleep(1)


@pytest.mark.real_engine
async def test_vllm_that_was_not_started_for_it_says_so_when_it_is_told_to_sleep() -> None:
    async with started("vllm") as engine:
        assert await engine.close_if_idle()
        with pytest.raises(EngineError, match=r"m: sleep failed: ValueError: .* without enable_sleep_mode"):
            await engine.sleep(1)
        await engine.stop()
        assert engine.memory_bytes() == 0


@pytest.mark.real_engine
async def test_an_embedding_model_starts_warm_and_embeds() -> None:
    args = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 512, "runner": "pooling", "convert": "embed"}
    address, port = reserve_port("127.0.0.1")
    engine = EngineProcess(dataclasses.replace(SPECS["vllm"], args=args), address, secret=SECRET)
    await engine.start()
    async with (
        aiohttp.ClientSession(address.url, headers={SECRET_HEADER: SECRET}) as session,
        session.post("/v1/embeddings", json={"model": "m", "input": ["Paris", "巴黎"]}) as answer,
    ):
        vectors = [item["embedding"] for item in (await answer.json())["data"]]
    assert [len(vector) for vector in vectors] == [576, 576]
    await engine.stop()
    port.close()


@pytest.mark.real_engine
async def test_what_is_preloaded_exists_in_this_vllm() -> None:
    """A renamed module is passed over at run time, and costs every cold start its import."""
    check = (
        "import importlib\n"
        "from serve_app.engines import vllm\n"
        "for name in vllm._PRELOADED:\n"
        "    importlib.import_module(name)\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", check, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    assert process.returncode == 0, said.decode()[-500:]
