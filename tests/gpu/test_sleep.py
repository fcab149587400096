"""Sleep on a real GPU: the memory is given back, and what wakes says the same. Needs a CUDA GPU and `vllm`.

make gpu
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from serve_app.engines.base import SECRET_HEADER, EngineSpec, Phase
from serve_app.engines.port import reserve_port
from serve_app.engines.process import EngineProcess

pytestmark = [pytest.mark.gpu, pytest.mark.real_engine]

MODELS_DIR = Path(os.environ.get("MODELS_DIR") or Path(__file__).resolve().parents[2] / ".models").absolute()
SECRET = "gpu"
# A CUDA context and what NCCL and the graphs keep; the engine below takes several times that.
ASLEEP_GB = 2.0
ENGINE = {
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "gpu_memory_utilization": 0.1,
    "enable_sleep_mode": True,
    "enable_prefix_caching": True,
}


def used_gb() -> float:
    """What is taken of the first GPU, by whomever: in a container NVML's process ids are not ours."""
    import pynvml

    pynvml.nvmlInit()
    return float(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used) / 1e9


async def say(session: aiohttp.ClientSession) -> str:
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    body: dict[str, Any] = {"model": "m", "messages": messages, "max_tokens": 24, "temperature": 0}
    async with session.post("/v1/chat/completions", json=body) as answer:
        assert answer.status == 200
        return str((await answer.json())["choices"][0]["message"]["content"])


@pytest.mark.parametrize("level", [1, 2])
async def test_sleep_gives_the_memory_back_and_the_text_is_the_same_after_it(level: int) -> None:
    before_gb = used_gb()
    address, port = reserve_port("127.0.0.1")
    source = str(MODELS_DIR / "smollm2-135m-instruct")
    engine = EngineProcess(EngineSpec("m", "vllm", source, ENGINE, {"HF_HUB_OFFLINE": "1"}, 8), address, secret=SECRET)
    began = time.monotonic()
    await engine.start()
    load_s = time.monotonic() - began
    try:
        async with aiohttp.ClientSession(address.url, headers={SECRET_HEADER: SECRET}) as session:
            awake_gb = used_gb() - before_gb
            text = await say(session)
            assert "Paris" in text
            for _ in range(2):
                assert await engine.close_if_idle()
                await engine.sleep(level)
                asleep_gb = used_gb() - before_gb
                assert asleep_gb < min(ASLEEP_GB, awake_gb / 2), f"{asleep_gb:.1f} of {awake_gb:.1f} GB are still taken"
                began = time.monotonic()
                await engine.wake()
                wake_s = time.monotonic() - began
                assert engine.phase is Phase.READY
                assert await say(session) == text
                print(f"level {level}: load {load_s:.1f} s, wake {wake_s:.2f} s, {awake_gb:.1f} -> {asleep_gb:.1f} GB")
                assert wake_s < load_s
    finally:
        await engine.stop(5)
        port.close()
    assert used_gb() - before_gb < 0.2
