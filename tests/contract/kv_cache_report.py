"""Prints what vLLM makes of its KV cache for a model: `python -m tests.contract.kv_cache_report DIRECTORY BYTES`."""

from __future__ import annotations

import json
import sys

from vllm import LLM


def main(directory: str, kv_cache_bytes: int) -> None:
    llm = LLM(
        directory,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=4,
        kv_cache_memory_bytes=kv_cache_bytes,
    )
    (layers,) = llm.collective_rpc("get_kv_cache_spec")
    cache = llm.llm_engine.vllm_config.cache_config
    told = {
        "blocks": cache.num_gpu_blocks,
        "block_size": cache.block_size,
        "bytes_per_token": sum(layer.page_size_bytes // layer.block_size for layer in layers.values()),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
