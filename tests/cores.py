"""Which cores the engines of a pytest worker compute on: vLLM gives all engines of a machine the same ones."""

from __future__ import annotations

import os


def _engine_cores() -> dict[str, str]:
    worker, workers = (os.environ.get(f"PYTEST_XDIST_WORKER{more}") for more in ("", "_COUNT"))
    if not worker or not workers or workers == "1":
        return {}
    cores = sorted(os.sched_getaffinity(0))
    own = cores[int(worker.removeprefix("gw")) % len(cores) :: int(workers)]
    return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, own))}


# For an engine's environment; empty where there is one worker.
ENGINE_CORES = _engine_cores()
