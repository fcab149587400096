"""serve_app.sizing: figures that are published, what is refused, and what `size` says of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from serve_app.cli import app
from serve_app.known_models import known_config, published_as
from serve_app.sizing.accelerators import GB, accelerator_bytes, gpu_bytes
from serve_app.sizing.memory import Request, fit, kv_bytes_per_token, longest_context, request_bytes, weight_bytes
from serve_app.sizing.quantization import SizingError, chosen, quantization_of
from serve_app.sizing.shape import Shape, parameters, read_shape


def shape_of(model: str) -> Shape:
    config = known_config(model)
    assert config is not None
    return read_shape(config)


# Published figures


@pytest.mark.parametrize(
    ("model", "billions", "without_embeddings"),
    [  # the "Model Overview" of each model card on the Hugging Face hub
        ("Qwen/Qwen3-0.6B", 0.6, 0.44),
        ("Qwen/Qwen3-1.7B", 1.7, 1.4),
        ("Qwen/Qwen3-4B", 4.0, 3.6),
        ("Qwen/Qwen3-8B", 8.2, 6.95),
        ("Qwen/Qwen3-14B", 14.8, 13.2),
        ("Qwen/Qwen3-32B", 32.8, 31.2),
        ("Qwen/Qwen3-30B-A3B", 30.5, 29.9),
        ("Qwen/Qwen3-235B-A22B", 235, 234),
    ],
)
def test_parameters_of_known_models_are_those_of_their_cards(
    model: str, billions: float, without_embeddings: float
) -> None:
    count = parameters(shape_of(model))
    assert count.total / 1e9 == pytest.approx(billions, rel=0.02)
    assert (count.total - count.embedding) / 1e9 == pytest.approx(without_embeddings, rel=0.02)


def test_qwen3_14b_takes_163840_bytes_a_token_at_16_bits() -> None:
    shape = shape_of("Qwen/Qwen3-14B")
    # Its card: 40 layers, 8 KV heads; config.json: head_dim 128. Keys and values of 2 bytes each.
    assert kv_bytes_per_token(shape, "auto") == 2 * 40 * 8 * 128 * 2 == 163_840
    assert kv_bytes_per_token(shape, "fp8") == 81_920
    assert kv_bytes_per_token(shape, "auto", tensor_parallel=2) == 81_920
    assert kv_bytes_per_token(shape, "auto", tensor_parallel=16) == kv_bytes_per_token(shape, "auto", tensor_parallel=8)


def test_a_latent_is_cached_once_whatever_the_heads_and_gpus() -> None:
    shape = read_shape(deepseek())
    # DeepSeek-V3's published dimensions: 61 layers, a latent of 512 and 64 of rotary key: 70 kB a token.
    assert kv_bytes_per_token(shape, "auto") == 61 * (512 + 64) * 2 == 70_272
    assert kv_bytes_per_token(shape, "auto", tensor_parallel=8) == 70_272
    assert parameters(shape).total / 1e9 == pytest.approx(671, rel=0.005)


def deepseek() -> dict[str, Any]:
    return {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
        "max_position_embeddings": 163840, "tie_word_embeddings": False,
    }  # fmt: skip


def test_layers_with_a_window_keep_the_window_and_the_step_in_flight() -> None:
    config = {**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 12, "sliding_window": 512}
    shape = read_shape(config)
    assert (shape.window, shape.window_layers) == (512, 10)
    layer = kv_bytes_per_token(shape, "auto") // 2
    request = Request(24 * GB, 8192, max_num_batched_tokens=1024)
    assert request_bytes(shape, request) == layer * (2 * 8192 + 10 * (512 - 1 + 1024))
    short = dataclasses.replace(request, context=256)
    assert request_bytes(shape, short) == layer * 12 * 256


# What is refused

LLAMA = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "qwen3_next", "linear_num_value_heads": 32}, "linear attention"),
        ({"model_type": "jamba", "mamba_d_state": 16}, "Mamba"),
        ({"model_type": "qwen2_5_vl", "vision_config": {}}, "vision tower"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "gpt_oss"}, "not one of those"),
        ({"model_type": None}, "not one of those"),
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers: must be"),
        ({"vocab_size": 0}, "vocab_size: must be"),
        ({"sliding_window": 8, "layer_types": ["linear_attention"] * 4}, "layer_types"),
    ],
)
def test_what_cannot_be_counted_is_refused_with_the_reason(change: dict[str, Any], said: str) -> None:
    with pytest.raises(SizingError, match=said):
        read_shape({**LLAMA, **change})


def compressed(bits: int, kind: str) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("config", "format"),
    [
        (None, "none"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        (compressed(8, "float"), "fp8"),
        (compressed(4, "int"), "int4"),
    ],
)
def test_format_of_the_files_is_read(config: dict[str, Any] | None, format: str) -> None:
    assert quantization_of(config) == format


@pytest.mark.parametrize(
    "config", [{"quant_method": "bitsandbytes"}, {}, {"quant_method": "gptq", "bits": 3}, {"quant_method": "mxfp4"}]
)
def test_other_formats_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(SizingError, match="quantization_config"):
        quantization_of({"x": 1, **config})


def test_a_format_that_the_files_do_not_have_is_not_believed() -> None:
    with pytest.raises(SizingError, match="these weights are awq"):
        chosen("fp8", {"quant_method": "awq", "bits": 4})


# What follows from what


@given(
    context=st.integers(16, 200_000),
    gigabytes=st.integers(8, 37),  # on cards of 70 GiB vLLM takes larger steps
    parts=st.sampled_from([1, 2, 4, 8]),
    quantization=st.sampled_from(["none", "fp8", "awq"]),
)
def test_a_smaller_wish_never_fits_worse(context: int, gigabytes: int, parts: int, quantization: Any) -> None:
    shape = shape_of("Qwen/Qwen3-14B")
    request = Request(gigabytes * GB, context, quantization, tensor_parallel=parts)
    fits = fit(shape, request)
    for easier in ({"context": max(16, context // 2)}, {"kv_cache": "fp8"}, {"gpu_bytes": 2 * request.gpu_bytes}):
        assert fit(shape, dataclasses.replace(request, **easier)).contexts >= fits.contexts
    assert not (fits.fits and fits.surely_too_small)
    longest = longest_context(shape, request)
    assert longest == 0 or fit(shape, dataclasses.replace(request, context=longest)).fits
    assert not fit(shape, dataclasses.replace(request, context=longest + 1024)).fits


def test_parts_of_a_divided_model_add_up_to_the_whole() -> None:
    shape = shape_of("Qwen/Qwen3-14B")
    whole, half = weight_bytes(shape, "fp8"), weight_bytes(shape, "fp8", 2)
    assert whole < 2 * half < 1.001 * whole
    with pytest.raises(SizingError, match="40 attention heads do not divide into 3"):
        fit(shape, Request(80 * GB, 1024, tensor_parallel=3))


# GPUs


def test_a_size_is_decimal_and_a_name_is_what_its_driver_shows() -> None:
    assert gpu_bytes("24GB") == gpu_bytes(" 24 ") == 24 * GB < gpu_bytes("L4") < gpu_bytes("24GiB")
    assert gpu_bytes("nvidia-h100") == accelerator_bytes("H100") == 81559 * 1024**2
    assert accelerator_bytes("A100") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [("A100", "several sizes"), ("big", "neither"), ("0GB", "between"), ("-4", "neither"), ("", "neither")],
)
def test_what_is_no_gpu_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        gpu_bytes(text)


# The command


def size(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["size", *args])
    return result.exit_code, result.output


def test_size_says_what_would_fit_where_it_does_not() -> None:
    code, said = size("--gpu", "24GB", "--model", "Qwen/Qwen3-14B", "--context", "16384")
    assert code == 1
    assert "It does not fit" in said
    assert "--quantization awq" in said


def test_size_says_which_settings_to_use_where_it_fits() -> None:
    code, said = size("--gpu", "24GB", "--model", "Qwen/Qwen3-14B", "--quantization", "awq", "--kv-cache-dtype", "fp8")
    assert code == 0
    assert "source: Qwen/Qwen3-14B-AWQ" in said
    assert "kv_cache_dtype: fp8" in said


def test_size_counts_for_a_program_in_bytes() -> None:
    code, said = size("--gpu", "H100", "--model", "Qwen/Qwen3-14B-FP8", "--json")
    told = json.loads(said)
    assert code == 0
    assert told["fits"]
    assert told["kv_bytes_per_token"] == 163_840
    assert told["kv_bytes"] == told["budget_bytes"] - told["weight_bytes"] - told["estimate_bytes"]


def test_size_takes_a_directory_with_nothing_but_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    code, said = size("--gpu", "24GB", "--model", str(tmp_path), "--context", "1024", "--json")
    assert (code, json.loads(said)["model"]) == (0, str(tmp_path))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--gpu", "24GX", "--model", "Qwen/Qwen3-14B"), "--gpu: 24GX is neither"),
        (("--gpu", "24", "--model", "/no/such"), "/no/such: no such directory"),
        (("--gpu", "24", "--model", "a/b/c"), "neither a directory nor a hub id"),
        (("--gpu", "24", "--model", "Qwen/Qwen3-14B", "--quantization", "q4"), "q4 is not one of"),
        (("--gpu", "24", "--model", "Qwen/Qwen3-14B", "--kv-cache-dtype", "int1"), "--kv-cache-dtype: int1"),
        (("--gpu", "24", "--model", "Qwen/Qwen3-14B", "--tensor-parallel", "3"), "do not divide"),
    ],
)
def test_what_is_typed_wrongly_is_said(args: tuple[str, ...], said: str) -> None:
    code, text = size(*args)
    assert code == 1
    assert said in text


def test_broken_files_are_said_by_their_path(tmp_path: Path) -> None:
    assert "holds no config.json" in size("--gpu", "24", "--model", str(tmp_path))[1]
    (tmp_path / "config.json").write_text("{")
    assert "config.json: not valid JSON" in size("--gpu", "24", "--model", str(tmp_path))[1]


def test_published_formats_are_named_only_where_there_are_any() -> None:
    assert published_as("Qwen/Qwen3-14B", "awq") == "Qwen/Qwen3-14B-AWQ"
    assert published_as("Qwen/Qwen3-1.7B", "awq") is None
    assert published_as("org/other", "fp8") is None
