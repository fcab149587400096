"""The embedding scorer's process: `python -m serve_app.scoring.worker THREADS`.

A process of its own, because importing PyTorch takes seconds of the interpreter lock, and its operators hold that
lock in between: neither may touch the Router's event loop. Speaks JSON lines: `Parts` with an id in, logits out.
It ends when its input does.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from serve_app.scoring.e5 import E5File, encoder, tokenizer
from serve_app.scoring.sequence import LONGEST, Parts, sequence_of

HEAD = Path(__file__).parent / "head.safetensors"
# The head was trained on means scaled by this; without it its learning rate had to be another.
_POOL_SCALE = 4


class Encoder:
    """Encoder with merged adapters, int8 where this CPU has the kernels, and head."""

    def __init__(self, head: Path = HEAD) -> None:
        self._file = E5File()
        tokens = tokenizer(self._file)
        self._encode = lambda text: tokens.encode(text, add_special_tokens=False).ids
        with safe_open(head, "pt") as saved:
            self.settings: dict[str, Any] = json.loads(saved.metadata()["settings"])
            tensors = {name: saved.get_tensor(name).float() for name in saved.keys()}  # noqa: SIM118 # not a dict
        model = encoder(self._file, self.settings["layers"])
        self._head = torch.nn.Linear(self._file.shape.hidden, 2)
        self._head.load_state_dict({name: tensors.pop(f"head.{name}") for name in ("weight", "bias")})
        layers = model.encoder.layer
        for name in [name for name in tensors if name.endswith(".a")]:
            place = name.removesuffix(".a")
            linear = layers.get_submodule(place)
            linear.weight.data += self.settings["scale"] * tensors[f"{place}.b"] @ tensors[name]
        self._model = _quantized(model)

    def logits(self, parts: Parts) -> tuple[float, float]:
        """For thinking, and for the large model."""
        ids = sequence_of(parts, self._encode, start=self._file.start, end=self._file.end)
        with torch.inference_mode():
            words = torch.from_numpy(self._file.word_rows(ids))[None]
            pooled = self._model(inputs_embeds=words).last_hidden_state[0].mean(0)
            think, large = self._head(pooled * _POOL_SCALE).tolist()
        return think, large


def _quantized(model: Any) -> Any:
    """int8 weights, activations quantized on the way: 2.5 times as fast on one core, the same answers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated for torchao, which is one more package
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def main() -> None:
    # What libraries print must not get between the lines of the protocol.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(int(sys.argv[1]))
    made = Encoder()
    made.logits(Parts(ask="warm up " * LONGEST))
    print(json.dumps({"ready": made.settings}), file=out)
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        for line in sys.stdin:
            question = json.loads(line)
            began = time.perf_counter()
            think, large = made.logits(Parts(**question["parts"]))
            answer = {"id": question["id"], "think": think, "large": large, "s": time.perf_counter() - began}
            print(json.dumps(answer), file=out)


if __name__ == "__main__":
    main()
