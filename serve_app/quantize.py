"""`python -m serve_app quantize`: a smaller copy of a model by llm-compressor, and a look at whether it still works.

llm-compressor asks for other versions of transformers and compressed-tensors than vLLM does, so it lives in an
environment of its own: `make quantize`. What it writes is `compressed-tensors`, which vLLM reads by itself.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import json
import math
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import psutil

from serve_app.model_schema import located
from serve_app.sizing.memory import weight_bytes
from serve_app.sizing.quantization import SizingError
from serve_app.sizing.shape import read_shape
from serve_app.sizing.source import find_config

Scheme = Literal["fp8", "awq", "int8"]
GB = 1_000_000_000
# llm-compressor's names. fp8: weights by channel, activations by token as they come, no data needed. int8: the same in
# integers. awq: 4-bit weights in groups, scaled by what calibration data show to matter.
PRESETS: Mapping[Scheme, str] = {"fp8": "FP8_DYNAMIC", "int8": "W8A8", "awq": "W4A16_ASYM"}
# How much the loss on `CHECK_TEXTS` may rise, in nats a token, before a copy counts as broken. Small models lose most:
# SmolLM2-135M 0.01 with fp8 and 0.11 with int8 (tests/quantize). The bound of awq is a guess.
MOST_LOSS: Mapping[Scheme, float] = {"fp8": 0.15, "int8": 0.15, "awq": 0.6}
_CALIBRATION_TOKENS = 512
# Memory beside the weights: PyTorch, a layer's activations and its copy.
_OVERHEAD_BYTES = 3 * GB

CHECK_TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome. The capital of Spain is Madrid.",
    "Water boils at 100 degrees Celsius at sea level. On a high mountain it boils at a lower temperature.",
    "def add(a: int, b: int) -> int:\n    return a + b\n\n\nassert add(2, 3) == 5\n",
    "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve.",
    "北京是中华人民共和国的首都，上海是中国最大的城市之一。",
    "To be, or not to be, that is the question: whether it is nobler in the mind to suffer.",
)


class QuantizeError(Exception):
    """A model could not be quantized; the message says why and what to do."""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What came of it. Losses in nats a token on `CHECK_TEXTS`; `agreement`: of favourites."""

    out: Path
    bytes_before: int
    bytes_after: int
    loss_before: float
    loss_after: float
    agreement: float


def prepare(source: str, config: Mapping[str, Any], scheme: str, out: Path) -> Scheme:
    """Whether this can be done at all. Raises `QuantizeError`."""
    chosen = next((known for known in PRESETS if known == scheme), None)
    if chosen is None:
        raise QuantizeError(f"--scheme: {scheme} is not one of {', '.join(PRESETS)}")
    if config.get("quantization_config"):
        raise QuantizeError(f"{source}: is quantized already; start from the plain model")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise QuantizeError(f"{out}: exists already; choose another --out or remove it")
    if not importlib.util.find_spec("llmcompressor"):
        raise QuantizeError(
            "llm-compressor is not installed here; `make quantize ARGS='...'` keeps it in an environment of its own,"
            " or pip install '.[quantize]' in one without vLLM"
        )
    return chosen


def check_room(config: Mapping[str, Any], scheme: Scheme, out: Path, free_memory: int, free_disk: int) -> None:
    """Whether memory and disk suffice, where the model's size is known. Raises `QuantizeError`."""
    try:
        shape = read_shape(config)
    except SizingError:
        return
    plain, small = weight_bytes(shape, "none"), weight_bytes(shape, scheme)
    needed = int(plain * 1.2) + _OVERHEAD_BYTES
    if needed > free_memory:
        raise QuantizeError(
            f"needs about {needed / GB:.0f} GB of memory ({plain / GB:.1f} GB of weights in 16 bits),"
            f" {free_memory / GB:.0f} GB are free here"
        )
    if small * 1.1 > free_disk:
        raise QuantizeError(f"{out}: needs {small * 1.1 / GB:.1f} GB, its disk has {free_disk / GB:.1f} GB free")


def check_device(scheme: Scheme, *, has_gpu: bool) -> None:
    """Raises `QuantizeError` where there is no GPU and the scheme needs one."""
    if scheme == "awq" and not has_gpu:
        # 0.14 pins memory for an accelerator in its grid search, and fails without one.
        raise QuantizeError("no CUDA GPU here: llm-compressor's AWQ runs on one only; fp8 and int8 need none")


def calibration_texts(file: Path | None, scheme: Scheme, samples: int) -> list[Any]:
    """Texts, or lists of chat messages, one JSON object a line: {"text": ...} or {"messages": [...]}.

    Raises `QuantizeError`; quotes nothing of them.
    """
    if scheme != "awq":
        if file is not None:
            raise QuantizeError(f"--calibration: {scheme} needs no data; leave it out")
        return []
    if file is None:
        raise QuantizeError(
            '--calibration: missing; AWQ needs some 100 prompts like those it will serve, one {"messages": [...]} or'
            ' {"text": "..."} a line'
        )
    try:
        lines = [line for line in file.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise QuantizeError(f"{file}: cannot be read ({type(error).__name__})") from None
    found = [_calibration_line(file, number, line) for number, line in enumerate(lines, 1)]
    if not found:
        raise QuantizeError(f"{file}: is empty")
    return found[:samples]


def _calibration_line(file: Path, number: int, line: str) -> Any:
    try:
        row = json.loads(line)
    except ValueError:
        raise QuantizeError(f"{file}: line {number}: not valid JSON") from None
    if isinstance(row, dict) and isinstance(row.get("text"), str) and row["text"]:
        return row["text"]
    if isinstance(row, dict) and isinstance(row.get("messages"), list) and row["messages"]:
        return row["messages"]
    raise QuantizeError(f'{file}: line {number}: holds neither "text" nor "messages"')


def quantize(source: str, scheme: Scheme, out: Path, calibration: Sequence[Any]) -> Result:
    """Quantize a model into `out` and compare the copy, read back from there, with the original.

    Raises `QuantizeError`, also where the copy is much worse; it is then left in `out` to be looked at.
    """
    import torch
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        before = _look(model, tokenizer)
        data = _tokenized(calibration, tokenizer) if calibration else {}
        oneshot(model=model, tokenizer=tokenizer, recipe=_recipe(scheme, model), output_dir=str(out), **data)
        del model
        gc.collect()
        copy = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16, device_map=place)
        after = _look(copy, tokenizer)
    except (MemoryError, torch.OutOfMemoryError):
        raise QuantizeError(f"{source}: the memory did not suffice") from None
    except (OSError, ValueError) as error:
        raise QuantizeError(f"{source}: {str(error).splitlines()[0]}") from None
    result = Result(
        out=out,
        bytes_before=_weight_files(Path(source)),
        bytes_after=_weight_files(out),
        loss_before=before.loss,
        loss_after=after.loss,
        agreement=sum(a == b for a, b in zip(before.favourites, after.favourites, strict=True)) / len(after.favourites),
    )
    if not math.isfinite(after.loss) or after.loss - before.loss > MOST_LOSS[scheme]:
        raise QuantizeError(
            f"{out}: the copy is broken: its loss on {len(CHECK_TEXTS)} plain texts is {after.loss:.3f} nats a token,"
            f" the original's {before.loss:.3f}, and {MOST_LOSS[scheme]:g} more would be acceptable"
        )
    return result


def _recipe(scheme: Scheme, model: Any) -> Any:
    from llmcompressor.modifiers.awq import AWQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    # The head stays in 16 bits, as in Qwen's own FP8 and AWQ files: it is small, and an error there hits every token.
    ignore = ["lm_head", "re:.*mlp.gate$"]
    if scheme != "awq":
        return QuantizationModifier(targets=["Linear"], scheme=PRESETS[scheme], ignore=ignore)
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme

    preset: QuantizationScheme = preset_name_to_scheme(PRESETS[scheme], ["Linear"])
    preset.weights.group_size = group_size(_columns(model))
    return AWQModifier(config_groups={"group_0": preset}, ignore=ignore)


def group_size(columns: Collection[int]) -> int:
    """The largest group that divides every layer's columns, as vLLM's kernels want it; of small models 128 may not.

    Raises `QuantizeError` where none does.
    """
    for size in (128, 64, 32):
        if all(count % size == 0 for count in columns):
            return size
    raise QuantizeError("AWQ: the model's layers do not divide into groups of 128, 64 or 32; use fp8 or int8")


def _columns(model: Any) -> set[int]:
    import torch

    linear = (part for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and name != "lm_head")
    return {part.in_features for part in linear}


def _tokenized(calibration: Sequence[Any], tokenizer: Any) -> dict[str, Any]:
    from datasets import Dataset

    texts = [
        entry if isinstance(entry, str) else tokenizer.apply_chat_template(entry, tokenize=False)
        for entry in calibration
    ]
    rows = [tokenizer(text, truncation=True, max_length=_CALIBRATION_TOKENS) for text in texts]
    return {
        "dataset": Dataset.from_list([dict(row) for row in rows]),
        "num_calibration_samples": len(rows),
        "max_seq_length": _CALIBRATION_TOKENS,
    }


@dataclasses.dataclass(frozen=True, slots=True)
class _Look:
    loss: float
    favourites: Sequence[int]


def _look(model: Any, tokenizer: Any) -> _Look:
    """Mean loss over `CHECK_TEXTS`, and the most probable next token at each place."""
    import torch

    losses, favourites = 0.0, []
    for text in CHECK_TEXTS:
        tokens = tokenizer(text, return_tensors="pt").input_ids.to(model.device)
        with torch.no_grad():
            logits = model(tokens).logits[0, :-1].float()
        losses += float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
        favourites += logits.argmax(-1).tolist()
    return _Look(losses / len(favourites), favourites)


def _weight_files(directory: Path) -> int:
    """Bytes of the weights; 0 for what is not a directory here."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def command(model: str, models_dir: str, scheme: str, out: Path, calibration: Path | None, samples: int) -> str:
    """Check everything that can be checked first, quantize, and say what came of it.

    Raises `QuantizeError`, and `SizingError` where the model is not found.
    """
    source = located(model, models_dir)
    config = find_config(source)
    chosen = prepare(model, config, scheme, out)
    texts = calibration_texts(calibration, chosen, samples)
    parent = next(place for place in (out, *out.absolute().parents) if place.is_dir())
    check_room(config, chosen, out, psutil.virtual_memory().available, shutil.disk_usage(parent).free)
    check_device(chosen, has_gpu=_has_gpu())
    result = quantize(source, chosen, out, texts)
    before = f"{result.bytes_before / GB:.2f} GB -> " if result.bytes_before else ""
    return (
        f"{out}: {before}{result.bytes_after / GB:.2f} GB; loss {result.loss_before:.3f} -> {result.loss_after:.3f}"
        f" nats a token on {len(CHECK_TEXTS)} plain texts, {result.agreement:.0%} of tokens agree.\n"
        "That it is not broken is all this says: try it on your own task before you serve it."
    )


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())
