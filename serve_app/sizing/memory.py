"""What an engine takes of a GPU, and whether that fits. Pure.

The split is vLLM's own (v0.32, `GPUWorker.determine_available_memory`): `gpu_memory_utilization` of the card, minus
weights, minus what a forward pass takes at its peak, minus CUDA graphs and what is not PyTorch's, is the KV cache; it
must hold one request of `max_model_len` tokens, or vLLM refuses to start. Weights and KV cache are exact; the rest is
measured by vLLM at the start, and an estimate here (`_estimate_bytes`).
"""

from __future__ import annotations

import dataclasses
import math

from serve_app.sizing.quantization import (
    KV_BYTES,
    LINEAR_BYTES,
    PLAIN_BYTES,
    KvCacheType,
    Quantization,
    SizingError,
)
from serve_app.sizing.shape import Shape, parameters

# vLLM's default of gpu_memory_utilization.
UTILIZATION = 0.92
# Estimates: CUDA context, cuBLAS and attention workspaces; NCCL's buffers between several GPUs; CUDA graphs.
_CONTEXT_BYTES = 600_000_000
_NCCL_BYTES = 500_000_000
_GRAPHS_BYTES = 600_000_000
# A batch's logits at their peak, for each: 16 bits, a float32 copy, and sorted values and indices for top-p and top-k.
_LOGIT_BYTES = 2 + 4 + 4 + 8
_SMALL_CARD_BYTES = 70 * 1024**3


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What is asked: this context on such a GPU. `utilization` is the share of it that the engine may take."""

    gpu_bytes: int
    context: int
    quantization: Quantization = "none"
    kv_cache: KvCacheType = "auto"
    tensor_parallel: int = 1
    utilization: float = UTILIZATION
    concurrency: int = 1
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    eager: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """Bytes on each GPU. `kv_bytes_per_token` counts the layers that keep every token."""

    weight_bytes: int
    estimate_bytes: int
    budget_bytes: int
    kv_bytes_per_token: int
    request_bytes: int
    concurrency: int

    @property
    def kv_bytes(self) -> int:
        """What is left for the KV cache; negative where not even the weights fit."""
        return self.budget_bytes - self.weight_bytes - self.estimate_bytes

    @property
    def contexts(self) -> float:
        """Full contexts that the KV cache holds at once."""
        return max(0.0, self.kv_bytes / self.request_bytes)

    @property
    def tokens(self) -> int:
        """Tokens that the KV cache holds at least."""
        return max(0, self.kv_bytes // self.kv_bytes_per_token) if self.kv_bytes_per_token else 0

    @property
    def fits(self) -> bool:
        """Whether it holds as many full contexts as were asked for."""
        return self.contexts >= self.concurrency

    @property
    def surely_too_small(self) -> bool:
        """Whether it would not start even if a forward pass took nothing."""
        return self.weight_bytes + self.request_bytes > self.budget_bytes


class PartsError(SizingError):
    """The model cannot be cut into so many parts for tensor parallelism, and vLLM would refuse to."""


def fit(shape: Shape, request: Request) -> Fit:
    """What this takes. Raises `PartsError`."""
    parts = request.tensor_parallel
    if shape.heads % parts:
        raise PartsError(f"{shape.heads} attention heads do not divide into {parts}")
    # With more GPUs than KV heads each head is kept by several. Of MLA's latent vector every GPU has all.
    if not shape.latent and shape.kv_heads % parts and parts % shape.kv_heads:
        raise PartsError(f"{shape.kv_heads} KV heads do not divide into {parts}, nor {parts} into them")
    return Fit(
        weight_bytes=weight_bytes(shape, request.quantization, parts),
        estimate_bytes=_estimate_bytes(shape, request),
        budget_bytes=int(request.gpu_bytes * request.utilization),
        kv_bytes_per_token=kv_bytes_per_token(shape, request.kv_cache, parts),
        request_bytes=request_bytes(shape, request),
        concurrency=request.concurrency,
    )


def weight_bytes(shape: Shape, quantization: Quantization, tensor_parallel: int = 1) -> int:
    """Of the weights on each GPU. Linear layers, embeddings and head are divided, norms and gates are not."""
    count = parameters(shape)
    divided = count.linear * LINEAR_BYTES[quantization] + count.embedding * PLAIN_BYTES
    return math.ceil(divided / tensor_parallel) + count.other * PLAIN_BYTES


def kv_bytes_per_token_and_layer(shape: Shape, kv_cache: KvCacheType, tensor_parallel: int = 1) -> int:
    """Keys and values of one token in one layer: 2 x KV heads x head_dim x bytes.

    Heads are divided between GPUs, and kept by each of them where there are fewer heads than GPUs. With MLA one latent
    vector and its rotary part, the same on every GPU (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).
    """
    if shape.latent:
        return (shape.latent.kv_rank + shape.latent.rope_dim) * KV_BYTES[kv_cache]
    return 2 * max(1, shape.kv_heads // tensor_parallel) * shape.head_dim * KV_BYTES[kv_cache]


def kv_bytes_per_token(shape: Shape, kv_cache: KvCacheType, tensor_parallel: int = 1) -> int:
    """Of the layers that keep every token, on each GPU."""
    layers = shape.layers - shape.window_layers
    return layers * kv_bytes_per_token_and_layer(shape, kv_cache, tensor_parallel)


def request_bytes(shape: Shape, request: Request) -> int:
    """KV cache of one request that fills the context.

    A layer with a window keeps `window - 1` tokens and those of the step in flight (vLLM's `SlidingWindowSpec`).
    Blocks, by which vLLM rounds up, are not counted: 16 tokens of 16,384 are 0.1 %.
    """
    layer = kv_bytes_per_token_and_layer(shape, request.kv_cache, request.tensor_parallel)
    kept = 0
    if shape.window:
        kept = min(request.context, shape.window - 1 + batched_tokens(request))
    return layer * ((shape.layers - shape.window_layers) * request.context + shape.window_layers * kept)


def batched_tokens(request: Request) -> int:
    """Tokens of one step: vLLM's default for a server goes by the card."""
    return request.max_num_batched_tokens or (2048 if request.gpu_bytes < _SMALL_CARD_BYTES else 8192)


def _estimate_bytes(shape: Shape, request: Request) -> int:
    """What a forward pass and the runtime take: an estimate on the safe side, no formula of vLLM's.

    The pass is at its peak in an MLP (hidden state, residual, gate and up, their product) or, later, in the sampler
    (`_LOGIT_BYTES`).
    """
    parts = request.tensor_parallel
    width = max(shape.width, shape.experts.width + shape.experts.shared_width if shape.experts else 0)
    mlp = batched_tokens(request) * (2 * shape.hidden + 3 * width // parts) * PLAIN_BYTES
    sequences = request.max_num_seqs or (256 if request.gpu_bytes < _SMALL_CARD_BYTES else 1024)
    sampler = sequences * shape.vocabulary * _LOGIT_BYTES
    graphs = 0 if request.eager else _GRAPHS_BYTES
    return max(mlp, sampler) + _CONTEXT_BYTES + graphs + (_NCCL_BYTES if parts > 1 else 0)


def longest_context(shape: Shape, request: Request) -> int:
    """The longest context, to 1,024 tokens, of which the GPU holds as many as asked for; 0 if none."""
    low, high = 0, 4096
    while low < high:
        middle = (low + high + 1) // 2
        if fit(shape, dataclasses.replace(request, context=middle * 1024)).fits:
            low = middle
        else:
            high = middle - 1
    return low * 1024


def ways_to_fit(shape: Shape, request: Request) -> list[Request]:
    """Other ways to serve this context, the smallest change first: what the quality costs least, then more GPUs."""
    smaller: tuple[Quantization, ...] = ("fp8", "awq") if request.quantization == "none" else ()
    found = []
    for parts in (size for size in (1, 2, 4, 8) if size >= request.tensor_parallel and shape.heads % size == 0):
        for quantization in (request.quantization, *smaller):
            for kv_cache in ("auto", "fp8") if request.kv_cache == "auto" else ("fp8",):
                other = dataclasses.replace(
                    request, quantization=quantization, kv_cache=kv_cache, tensor_parallel=parts
                )
                if other != request and fit(shape, other).fits:
                    found.append(other)
        if found and parts > request.tensor_parallel:
            break
    return found
