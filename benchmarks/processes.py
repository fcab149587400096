"""CPU time, memory and cores of running processes, from `/proc`: who used how much while a load ran."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

ROUTER = "Router replica"
_MIB = 1 << 20


def roles(root: int) -> dict[str, list[int]]:
    """The processes that descend from `serve run`, itself too, by what they are to the service."""
    found: dict[str, list[int]] = {}
    for process in family(root):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.setdefault(_role(" ".join(process.cmdline())), []).append(process.pid)
    return found


def _role(command: str) -> str:
    if "ServeReplica:" in command:
        # Ray adds the method that runs.
        deployment = command.split("ServeReplica:")[1].split()[0].partition(":")[2]
        return ROUTER if deployment == "Router" or deployment.startswith("Router.") else "model replica"
    if "benchmarks.bare_router" in command:
        return ROUTER
    if "serve_app.engines.host" in command:
        return "engine of the model replica"
    if "ServeController" in command or "ProxyActor" in command or "serve run" in command:
        return "Serve's controller, proxy and command"
    return "Ray's daemons"


def family(root: int) -> list[psutil.Process]:
    """A process and all that descend from it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    return []


def cpu_seconds(pids: Iterable[int]) -> float:
    """What all their threads have used so far, by the scheduler's own count (ns); ended threads not."""
    return sum(_cpu_ns(pid) for pid in pids) / 1e9


def _cpu_ns(pid: int) -> int:
    total = 0
    for thread in _threads(pid):
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0])
    return total


def _threads(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    return []


def machine_seconds() -> float:
    """What all cores together were busy since the machine began; time stolen from it counts."""
    times = psutil.cpu_times()
    return sum(times[:8]) - times.idle - times.iowait


def memory_mib(pids: Iterable[int]) -> tuple[float, float]:
    """Resident memory of all of them now, and at their peaks."""
    now = peak = 0.0
    for pid in pids:
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            now += psutil.Process(pid).memory_info().rss / _MIB
            status = Path(f"/proc/{pid}/status").read_text()
            peak += int(status.split("VmHWM:")[1].split()[0]) / 1024
    return now, peak


def pin(pids: Iterable[int], cores: Iterable[int]) -> None:
    """Bind every thread of these processes to the cores; threads and processes that they start inherit it."""
    wanted = set(cores)
    for pid in pids:
        for thread in _threads(pid):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, wanted)


def pinned_to(pids: Iterable[int]) -> set[int]:
    """The cores on which any of their threads may run."""
    cores: set[int] = set()
    for pid in pids:
        for thread in _threads(pid):
            with contextlib.suppress(OSError):
                cores |= os.sched_getaffinity(thread)
    return cores


class Cpu:
    """CPU seconds of groups of processes since `start`."""

    def __init__(self, groups: Mapping[str, list[int]]) -> None:
        self._groups = groups
        self.start()

    def _read(self) -> dict[str, float]:
        used = {name: cpu_seconds(pids) for name, pids in self._groups.items()}
        return used | {"machine": machine_seconds()}

    def start(self) -> None:
        """Count from now on."""
        self._before = self._read()

    def used(self) -> dict[str, float]:
        """Seconds since then by group; `machine` is everything that ran."""
        return {name: value - self._before[name] for name, value in self._read().items()}
