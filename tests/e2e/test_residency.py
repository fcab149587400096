"""Two lazy models with room for one, on the real engine, under clients that come, wait and leave."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from openai import APIError, AsyncOpenAI, OpenAI
from safetensors.torch import save_file

from tests.e2e.conftest import CPU_ENGINE, CPU_ENV
from tests.e2e.service import MODELS_DIR, Service, running, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.real_engine]

HOT, CHAT, QWEN, ADAPTED = "hot", "lazy-chat", "lazy-qwen", "hot-adapted"
REQUESTS, LEAVERS, AT_ONCE = 200, 0.3, 32
# What a router may say instead of an answer; everything else is a fault.
DOCUMENTED = {"model_loading", "model_starting", "overloaded", "too_many_waiting"}


def adapter(directory: Path) -> Path:
    """A LoRA adapter for SmolLM2-135M that turns its answers into something else: large random weights."""
    config = json.loads((MODELS_DIR / "smollm2-135m-instruct" / "config.json").read_text())
    hidden, rank = config["hidden_size"], 8
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(hidden, rank, generator=generator)
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["o_proj"], "bias": "none"})
    )
    return directory


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    shared = {"engine_env": CPU_ENV, "memory_gb": 3, "context": 1024, "max_ongoing_requests": 64}
    smollm = {"source": "smollm2-135m-instruct", "engine": CPU_ENGINE, **shared}
    qwen = {"source": "tiny-qwen3", "engine": CPU_ENGINE, **shared}
    adapted = adapter(tmp_path_factory.mktemp("adapter"))
    models = [
        {"id": HOT, "tier": "resident", **smollm, "engine": {**CPU_ENGINE, "max_loras": 1, "max_lora_rank": 8}},
        {"id": ADAPTED, "base": HOT, "adapter": str(adapted)},
        {"id": CHAT, "tier": "lazy", "idle_unload_s": 600, **smollm},
        {"id": QWEN, "tier": "lazy", "idle_unload_s": 600, **qwen},
    ]
    with running(models, pool={"memory_gb": 3, "min_residency_s": 2, "ageing_s": 5}) as service:
        yield service


def memory_gb(service: Service) -> float:
    """What the whole service takes, shared pages counted once; not files, whose pages other services share, too."""
    assert service._process
    leader = psutil.Process(service._process.pid)
    total = 0
    for process in [leader, *leader.children(recursive=True)]:
        with contextlib.suppress(OSError):  # it has ended
            found = re.findall(
                r"^Pss_(?:Anon|Shmem): +(\d+) kB$", Path(f"/proc/{process.pid}/smaps_rollup").read_text(), re.M
            )
            total += sum(map(int, found)) * 1024
    return total / 1e9


def test_an_adapter_answers_on_its_bases_engine_and_differs_from_it(tight: Service) -> None:
    client = OpenAI(base_url=f"{tight.base_url}/v1", api_key="none", max_retries=0)
    ask = [{"role": "user", "content": "What is the capital of France?"}]
    texts = {}
    for model in (HOT, ADAPTED):
        answer = client.chat.completions.create(model=model, messages=ask, max_tokens=12, temperature=0)
        assert answer.model == model
        texts[model] = answer.choices[0].message.content
    assert "Paris" in str(texts[HOT])
    assert texts[ADAPTED] != texts[HOT]
    assert tight.model(ADAPTED)["state"] == "awake"


@pytest.mark.timeout(900)
async def test_two_models_with_room_for_one_under_mixed_clients(tight: Service) -> None:
    tight.request(f"/v1/router/models/{CHAT}/load", {}, method="POST")
    tight.in_state(CHAT, "awake")
    tight.unload(CHAT)
    before_gb = memory_gb(tight)
    loads_before = {name: tight.model(name)["loads"] for name in (CHAT, QWEN)}
    random.seed(7)
    outcomes: collections.Counter[str] = collections.Counter()
    gate = asyncio.Semaphore(AT_ONCE)
    overlaps = 0
    over = asyncio.Event()

    async def watch() -> None:
        nonlocal overlaps
        while not over.is_set():
            # Of one moment: asked for one after the other, the first may go before the second is looked at.
            _, _, listed = await asyncio.to_thread(tight.request, "/v1/models")
            states = [card["state"] for card in listed["data"] if card["id"] in (CHAT, QWEN)]
            overlaps += sum(state in ("awake", "loading", "unloading") for state in states) > 1
            await asyncio.sleep(0.1)

    async with AsyncOpenAI(
        base_url=f"{tight.base_url}/v1", api_key="none", max_retries=0, timeout=httpx.Timeout(180)
    ) as client:

        async def one(number: int) -> None:
            model = random.choice((CHAT, QWEN, CHAT, QWEN, HOT))
            leaves = random.random() < LEAVERS
            patience = random.uniform(0.05, 4.0)
            async with gate:
                call = asyncio.create_task(_ask(client, model, stream=number % 2 == 0))
                try:
                    outcomes[await asyncio.wait_for(call, patience) if leaves else await call] += 1
                except TimeoutError:
                    outcomes["left"] += 1

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(one(number) for number in range(REQUESTS)))
        over.set()
        await watching

    unexpected = {what: count for what, count in outcomes.items() if what not in {"answered", "left", *DOCUMENTED}}
    assert not unexpected, outcomes
    assert outcomes["answered"] >= REQUESTS * (1 - LEAVERS) * 0.9, outcomes
    assert not overlaps, "both models held memory that is there for one"
    for name in (CHAT, QWEN):
        loads = tight.model(name)["loads"] - loads_before[name]
        assert 1 <= loads <= 40, f"{name} was loaded {loads} times for {REQUESTS} requests"
        tight.unload(name)
    wait_until(lambda: tight.model(HOT)["in_flight"] == 0, 10, "nothing is in flight")
    wait_until(lambda: memory_gb(tight) < before_gb * 1.1, 60, f"memory is back at {before_gb:.2f} GB")


async def _ask(client: AsyncOpenAI, model: str, *, stream: bool) -> str:
    ask = [{"role": "user", "content": f"Count to twenty. {random.random()}"}]
    try:
        if not stream:
            answer = await client.chat.completions.create(model=model, messages=ask, max_tokens=8)
            return "answered" if answer.choices[0].finish_reason else "cut"
        finish = None
        async for chunk in await client.chat.completions.create(model=model, messages=ask, max_tokens=8, stream=True):
            finish = (chunk.choices and chunk.choices[0].finish_reason) or finish
        return "answered" if finish else "cut"
    except APIError as error:
        body = error.body if isinstance(error.body, dict) else {}
        return str(body.get("code") or type(error).__name__)
