"""llm-compressor for real, on a 135M model. Needs the extra `quantize` in an environment of its own; AWQ a GPU too.

make quantize-test
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from serve_app.model_schema import REPOSITORY
from serve_app.quantize import CHECK_TEXTS, MOST_LOSS, QuantizeError, Scheme, calibration_texts, quantize
from serve_app.sizing.quantization import quantization_of

pytestmark = [pytest.mark.quantize, pytest.mark.timeout(1200)]

SOURCE = str(Path(os.environ.get("MODELS_DIR") or REPOSITORY / ".models").absolute() / "smollm2-135m-instruct")


def prompts(tmp_path: Path) -> Path:
    """Calibration data of both kinds."""
    file = tmp_path / "prompts.jsonl"
    asked = [{"messages": [{"role": "user", "content": f"Explain {thing} in a sentence."}]} for thing in THINGS]
    file.write_text("\n".join(json.dumps(row) for row in [*asked, *({"text": text} for text in CHECK_TEXTS)]))
    return file


THINGS = ("rain", "a loop in Python", "the French revolution", "compound interest", "photosynthesis", "a black hole")


@pytest.mark.parametrize(
    ("scheme", "bits", "smaller"),
    [
        ("fp8", "fp8", 0.85),
        ("int8", "int8", 0.85),
        pytest.param("awq", "int4", 0.7, marks=pytest.mark.gpu),
    ],
)
def test_a_copy_is_smaller_says_its_format_and_still_works(
    tmp_path: Path, scheme: Scheme, bits: str, smaller: float
) -> None:
    texts = calibration_texts(prompts(tmp_path), scheme, 16) if scheme == "awq" else []
    result = quantize(SOURCE, scheme, tmp_path / "copy", texts)
    # The embeddings, a fifth of this small model, stay in 16 bits.
    assert result.bytes_after < smaller * result.bytes_before
    assert result.agreement > 0.6
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert quantization_of(config["quantization_config"]) == bits


def test_a_copy_that_is_much_worse_is_said_to_be_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MOST_LOSS, "int8", 0.01)  # a tenth of what int8 costs this model
    with pytest.raises(QuantizeError, match="the copy is broken"):
        quantize(SOURCE, "int8", tmp_path / "copy", [])
