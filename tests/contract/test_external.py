"""vLLM's own server, started by somebody else with a key, behind the router: the answers are its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import uvicorn

from benchmarks.servers import BARE_MODULE
from serve_app.config import Config
from serve_app.engines.environment import host_environment
from serve_app.models.replicas import set_replicas
from serve_app.router.app import RouterApp
from serve_app.router.deployment import NoPool
from tests.ports import free_port

MODELS_DIR = Path(os.environ.get("MODELS_DIR") or Path(__file__).resolve().parents[2] / ".models").absolute()
KEY, THERE, HERE = "sk-their-secret-4711", "org/smol", "smol"
CHAT = "/v1/chat/completions"
START_S, LOOK_S = 120, 0.2
# Of the server; the router is told more, so that it is the server that refuses.
CONTEXT = 1024
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.real_engine]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Its base URL, whether or not it has started."""
    port = free_port()
    command = [sys.executable, "-m", BARE_MODULE, "--host", "127.0.0.1", "--port", str(port), "--api-key", KEY]
    command += ["--model", str(MODELS_DIR / "smollm2-135m-instruct"), "--served-model-name", THERE]
    command += ["--dtype", "bfloat16", "--enforce-eager", "--max-model-len", str(CONTEXT), "--max-num-seqs", "8"]
    environment = {**os.environ, **host_environment(), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    log = tmp_path_factory.mktemp("vllm") / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(30)


@contextlib.asynccontextmanager
async def router(url: str, key: str, directory: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """The router in front of it, over HTTP."""
    (directory / "key").write_text(key)
    external = {"urls": [url], "model": THERE, "api_key_file": str(directory / "key"), "health_every_s": LOOK_S}
    model = {"id": HERE, "tier": "resident", "context": 4 * CONTEXT, "external": external}
    config = Config.model_validate({"models": [model], "audit": {"sink": "none"}})
    # Two of them in one process must not find each other's replica, which has another key.
    table = f"{HERE} with {key}"
    server = uvicorn.Server(uvicorn.Config(RouterApp(config, {HERE: table}, NoPool(), "test"), port=free_port()))
    serving = asyncio.create_task(server.serve())
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{server.config.port}") as session:
            yield session
    finally:
        server.should_exit = True
        await serving
        set_replicas(table, [])


async def until(session: aiohttp.ClientSession, **wanted: str) -> None:
    """Wait until /v1/models says so of it."""
    async with asyncio.timeout(START_S):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"/v1/models/{HERE}") as answer:
                    card = await answer.json()
                    if wanted.items() <= card.items():
                        return
            await asyncio.sleep(LOOK_S)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(theirs: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[aiohttp.ClientSession]:
    async with router(theirs, KEY, tmp_path_factory.mktemp("keys")) as session:
        await until(session, state="awake")
        yield session


def body(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    return {"model": HERE, "messages": messages, "max_tokens": 12, "temperature": 0, **more}


async def test_answers_are_those_of_the_server_itself(http: aiohttp.ClientSession, theirs: str) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(headers=headers) as direct:
        own_url = theirs.removesuffix("/v1") + CHAT
        async with direct.post(own_url, json=body(model=THERE)) as own, http.post(CHAT, json=body()) as routed:
            bare, answer = await own.json(), await routed.json()
    assert routed.status == 200
    assert routed.headers["x-router-model"] == HERE
    assert answer["choices"] == bare["choices"]
    assert answer["usage"]["completion_tokens"] == bare["usage"]["completion_tokens"]


async def test_a_stream_joins_to_the_plain_answer(http: aiohttp.ClientSession) -> None:
    async with http.post(CHAT, json=body()) as plain, http.post(CHAT, json=body(stream=True)) as stream:
        text, events = (await plain.json())["choices"][0]["message"]["content"], await stream.text()
    chunks = [line.removeprefix("data: ") for line in events.split("\n\n") if line]
    assert chunks.pop() == "[DONE]"
    deltas = [json.loads(chunk)["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert "".join(deltas) == text


async def test_what_lies_beside_v1_and_what_does_not_fit_are_answered(http: aiohttp.ClientSession) -> None:
    async with http.post("/tokenize", json={"model": HERE, "prompt": "hello"}) as tokens:
        assert tokens.status == 200, await tokens.text()
        assert (await tokens.json())["count"] >= 1
    too_long = [{"role": "user", "content": "word " * (CONTEXT + 100)}]
    async with http.post(CHAT, json={"model": HERE, "messages": too_long}) as refused:
        assert refused.status == 400
        assert (await refused.json())["error"]["code"] == "context_length_exceeded"


async def test_a_wrong_key_is_said_to_the_operator_and_not_shown_to_clients(
    http: aiohttp.ClientSession, theirs: str, tmp_path: Path
) -> None:
    async with router(theirs, "sk-a-wrong-one", tmp_path) as session:
        await until(session, state="failed", failure="it refuses the router's key")
        async with session.post(CHAT, json=body()) as refused:
            error = (await refused.json())["error"]
    assert (refused.status, error["code"]) == (502, "upstream_unauthorized")
    assert "sk-" not in str(error)
