"""serve_app.engines.memory: what processes take, of GPUs or of the host."""

from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from serve_app.engines import memory


class Nvml:
    """A binding that knows two GPUs; the second has fallen off the bus."""

    NVMLError = RuntimeError

    def __init__(self, **by_pid: int) -> None:
        self.by_pid = by_pid

    def nvmlDeviceGetCount(self) -> int:  # NVIDIA's names
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, device: int) -> list[Any]:
        return [SimpleNamespace(pid=int(pid[1:]), usedGpuMemory=taken) for pid, taken in self.by_pid.items()]


def test_gpu_that_is_lost_says_nothing_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = psutil.Process()
    nvml = Nvml(**{f"p{ours.pid}": 5, "p1": 7})
    monkeypatch.setattr(memory, "_nvml", lambda: nvml)
    assert memory.taken_by([ours]) == 5


def test_host_memory_is_never_taken_for_a_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose process ids are not the host's."""
    monkeypatch.setattr(memory, "_nvml", lambda: Nvml(p1=7))
    assert memory.taken_by([psutil.Process()]) == 0


def test_without_a_gpu_it_is_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_nvml", lambda: None)
    assert memory.taken_by([psutil.Process()]) > 1e6
