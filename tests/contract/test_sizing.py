"""`serve_app.sizing` against the real thing: vLLM's own KV cache, and the models that transformers builds."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from serve_app.known_models import known_config
from serve_app.model_schema import REPOSITORY
from serve_app.sizing.memory import kv_bytes_per_token, weight_bytes
from serve_app.sizing.shape import parameters, read_shape
from serve_app.sizing.source import config_here
from tests.cores import ENGINE_CORES

pytestmark = pytest.mark.real_engine
MODELS_DIR = Path(os.environ.get("MODELS_DIR") or REPOSITORY / ".models").absolute()
KV_CACHE_BYTES = 1024**3


def files_of(model: str) -> Mapping[str, Any]:
    config = config_here(str(MODELS_DIR / model))
    assert config is not None
    return config


def reported_by_vllm(model: str) -> dict[str, int]:
    """From an engine with so much KV cache, in a process of its own."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **ENGINE_CORES}
    done = subprocess.run(
        [sys.executable, "-m", "tests.contract.kv_cache_report", str(MODELS_DIR / model), str(KV_CACHE_BYTES)],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("model", ["smollm2-135m-instruct", "tiny-qwen3"])
def test_vllm_takes_as_many_bytes_a_token_and_makes_as_many_blocks(model: str) -> None:
    told = reported_by_vllm(model)
    bytes_per_token = kv_bytes_per_token(read_shape(files_of(model)), "auto")
    assert told["bytes_per_token"] == bytes_per_token
    assert told["blocks"] == KV_CACHE_BYTES // (bytes_per_token * told["block_size"])


@pytest.mark.parametrize("model", ["smollm2-135m-instruct", "tiny-qwen3"])
def test_weights_take_as_many_bytes_as_their_file_holds(model: str) -> None:
    with (MODELS_DIR / model / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        tensors = json.loads(file.read(length))
    held = max(tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__")
    assert weight_bytes(read_shape(files_of(model)), "none") == held


# One file of each family that is counted, small, and with what is peculiar to it; the counts are transformers' own.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "num_key_value_heads": 2},
    "llama without head_dim": {"model_type": "llama", "head_dim": None},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 64},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True, "head_dim": None},
    "qwen3": {"num_key_value_heads": 2},
    "qwen3_moe": {"num_key_value_heads": 2, "num_experts": 6, "moe_intermediate_size": 48, "mlp_only_layers": [0]},
    "qwen3_moe sparse": {
        "model_type": "qwen3_moe", "num_experts": 6, "moe_intermediate_size": 48, "decoder_sparse_step": 2,
    },
    "phi3": {"num_key_value_heads": 2, "head_dim": None, "pad_token_id": 0},
    "gemma3_text": {"num_key_value_heads": 2, "sliding_window": 64, "tie_word_embeddings": True},
    "deepseek_v3": {
        "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24,
        "n_routed_experts": 8, "n_shared_experts": 2, "moe_intermediate_size": 40, "first_k_dense_replace": 1,
        "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "head_dim": 8,
    },
}  # fmt: skip
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "head_dim": 48,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


def built_by_transformers(config: Mapping[str, Any]) -> int:
    """Parameters of the model of this config, without memory for them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_as_many_as_transformers_builds(family: str) -> None:
    config = {"model_type": family, **SMALL, **FAMILIES[family]}
    config = {key: value for key, value in config.items() if value is not None}
    assert parameters(read_shape(config)).total == built_by_transformers(config)


@pytest.mark.parametrize("model", ["Qwen/Qwen3-14B", "Qwen/Qwen3-30B-A3B"])
def test_known_models_have_as_many_parameters_as_transformers_builds_of_them(model: str) -> None:
    config = known_config(model)
    assert config is not None
    assert parameters(read_shape(config)).total == built_by_transformers(config)
