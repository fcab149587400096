"""serve_app.quantize: everything that is refused before a byte is loaded. The real thing is tests/quantize."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from serve_app import quantize
from serve_app.cli import app
from serve_app.known_models import known_config
from serve_app.quantize import GB, QuantizeError, calibration_texts, check_device, check_room, group_size, prepare

PLAIN = known_config("Qwen/Qwen3-14B") or {}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def test_without_the_extra_it_says_how_to_get_it(not_installed: None, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["quantize", "Qwen/Qwen3-14B", "--scheme", "fp8", "--out", str(tmp_path / "x")])
    assert result.exit_code == 1
    assert "make quantize" in result.output


@pytest.mark.parametrize(
    ("config", "scheme", "out", "said"),
    [
        (PLAIN, "fp4", "new", "--scheme: fp4 is not one of fp8, int8, awq"),
        ({**PLAIN, "quantization_config": {"quant_method": "fp8"}}, "fp8", "new", "is quantized already"),
        (PLAIN, "fp8", "full", "exists already"),
        (PLAIN, "fp8", "full/file", "exists already"),
    ],
)
def test_what_cannot_be_done_is_said_first(
    installed: None, tmp_path: Path, config: dict[str, Any], scheme: str, out: str, said: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("kept")
    with pytest.raises(QuantizeError, match=said):
        prepare("Qwen/Qwen3-14B", config, scheme, tmp_path / out)
    assert (tmp_path / "full" / "file").read_text() == "kept"


def test_too_little_memory_or_disk_is_said_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(
        QuantizeError, match=r"about 38 GB of memory \(29\.5 GB of weights in 16 bits\), 32 GB are free"
    ):
        check_room(PLAIN, "fp8", tmp_path, free_memory=32 * GB, free_disk=100 * GB)
    with pytest.raises(QuantizeError, match=r"needs 18\.0 GB, its disk has 10\.0 GB free"):
        check_room(PLAIN, "fp8", tmp_path, free_memory=64 * GB, free_disk=10 * GB)
    check_room(PLAIN, "fp8", tmp_path, free_memory=64 * GB, free_disk=20 * GB)
    check_room({"model_type": "unheard-of"}, "fp8", tmp_path, free_memory=1, free_disk=1)


def test_awq_wants_a_gpu_and_the_others_do_not() -> None:
    with pytest.raises(QuantizeError, match="no CUDA GPU here"):
        check_device("awq", has_gpu=False)
    check_device("awq", has_gpu=True)
    check_device("fp8", has_gpu=False)
    check_device("int8", has_gpu=False)


# Calibration data


def test_texts_and_chats_are_read_up_to_as_many_as_asked_for(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, [{"text": "one"}, {"messages": chat}, {"text": "three"}])) + "\n\n")
    assert calibration_texts(file, "awq", 2) == ["one", chat]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("{", "line 1: not valid JSON"),
        ('{"text": "a"}\n{"prompt": "secret"}', 'line 2: holds neither "text" nor "messages"'),
        ('{"text": ""}', "line 1"),
        ('["a"]', "line 1"),
    ],
)
def test_data_that_cannot_be_used_are_named_by_their_line_and_not_quoted(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(QuantizeError, match=said) as error:
        calibration_texts(file, "awq", 8)
    assert "secret" not in str(error.value)


def test_data_are_asked_for_by_the_scheme_that_needs_them_only(tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match="--calibration: missing"):
        calibration_texts(None, "awq", 8)
    with pytest.raises(QuantizeError, match="fp8 needs no data"):
        calibration_texts(tmp_path, "fp8", 8)
    with pytest.raises(QuantizeError, match="cannot be read"):
        calibration_texts(tmp_path / "none", "awq", 8)
    assert calibration_texts(None, "int8", 8) == []


def test_groups_are_as_large_as_divide_every_layer() -> None:
    assert group_size({5120, 17408}) == 128
    assert group_size({576, 1536}) == 64
    with pytest.raises(QuantizeError, match="do not divide into groups"):
        group_size({576, 100})


def test_every_scheme_has_a_preset_and_a_bound() -> None:
    assert quantize.PRESETS.keys() == quantize.MOST_LOSS.keys()
