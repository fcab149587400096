"""The embedding scorer's process: `python -m serve_app.scoring.worker THREADS`.

A process of its own, because importing PyTorch takes seconds of the interpreter lock, and its operators hold that
lock in between: neither may touch the Router's event loop. Speaks JSON lines: `Parts` with an id in, logits out.
It ends when its input does.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from serve_app.scoring.e5 import E5File, encoder, tokenizer
from serve_app.scoring.sequence import LONGEST, Parts, sequence_of

HEAD = Path(__file__).parent / "head.safetensors"
# The head was trained on means scaled by this; without it its learning rate had to be another.
_POOL_SCALE = 4
_TRIALS = 3


class Encoder:
    """Encoder with merged adapters, in the number format that this CPU is quickest in, and head."""

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
        self._model = _quickest(model, self._file.shape.hidden)

    def logits(self, parts: Parts) -> tuple[float, float]:
        """For thinking, and for the large model."""
        ids = sequence_of(parts, self._encode, start=self._file.start, end=self._file.end)
        with torch.inference_mode():
            words = torch.from_numpy(self._file.word_rows(ids))[None].to(self._model.dtype)
            pooled = self._model(inputs_embeds=words).last_hidden_state[0].float().mean(0)
            think, large = self._head(pooled * _POOL_SCALE).tolist()
        return think, large


def _quickest(model: Any, hidden: int) -> Any:
    """bfloat16 or float32, whichever is quicker here: CPUs without bfloat16 instructions emulate it slowly.

    int8 (PyTorch's dynamic quantization) would be quicker still, but this encoder's activations have outliers: it
    moved logits by up to 6 and cost a hundredth of AUC on the development set, where bfloat16 costs nothing.
    """
    candidates = [copy.deepcopy(model).to(torch.bfloat16), model]
    return min(candidates, key=lambda candidate: _seconds(candidate, hidden))


def _seconds(model: Any, hidden: int) -> float:
    words = torch.zeros(1, LONGEST, hidden, dtype=model.dtype)
    best = math.inf
    with torch.inference_mode():
        for _ in range(_TRIALS):
            began = time.perf_counter()
            model(inputs_embeds=words)
            best = min(best, time.perf_counter() - began)
    return best


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
