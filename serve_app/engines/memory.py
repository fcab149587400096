"""How much memory processes take: of the GPUs, as NVML tells, or of the host."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection
from typing import Any

import psutil


def taken_by(processes: Collection[psutil.Process]) -> int:
    """Bytes that these processes take: of the GPUs where the machine has some, else of the host; 0 once they are gone.

    Of the host's memory, what several of them share by a fork counts once (proportional set size). Where NVML
    names processes otherwise than we do (a container without the host's process ids), GPU memory reads as 0.
    """
    if nvml := _nvml():
        return _on_gpus(nvml, {process.pid for process in processes})
    return sum(map(_on_host, processes))


def still_there(processes: Collection[psutil.Process]) -> bool:
    """Whether one of them runs, or takes memory: one that was killed does for a moment."""
    return any(map(_runs, processes)) or bool(taken_by([each for each in processes if each.is_running()]))


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _on_host(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error, OSError):
        return int(process.memory_full_info().pss)
    return 0


def _on_gpus(nvml: Any, pids: Collection[int]) -> int:
    total = 0
    for index in range(nvml.nvmlDeviceGetCount()):
        # One that has fallen off the bus, or tells nothing of processes, says nothing of the others.
        with contextlib.suppress(nvml.NVMLError):
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(device):
                if process.pid in pids:
                    total += process.usedGpuMemory or 0
    return total


@functools.cache
def _nvml() -> Any:
    """NVIDIA's own binding (nvidia-ml-py), where it is installed and finds a driver with a GPU."""
    try:
        import pynvml  # type: ignore[import-not-found,unused-ignore] # on GPU machines only

        pynvml.nvmlInit()
        return pynvml if pynvml.nvmlDeviceGetCount() else None
    except Exception:
        return None
