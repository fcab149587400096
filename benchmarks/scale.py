"""What each replica costs the rest of the service while nothing is asked: `make bench-scale`.

`serve run` of a hot model on so many replicas, scripted engines in processes of their own; then nothing is sent for
a while, and the CPU that each part used is counted. What may grow with the replicas: the Router hears what they
publish, Serve's controller looks after them. And without a service: what it takes to choose one of so many.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import timeit
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import yaml

from benchmarks.processes import Cpu, memory_mib, roles
from benchmarks.servers import Server, Servers, StartError
from serve_app.check import IMPORT_PATH, read_file
from serve_app.models.replicas import PublishedModel, Replica, choose, published, read_replica

_SETTLE_S = 5.0
_START_S = 300.0
_KNOWN = (1, 10, 100, 1000)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 8, 24])
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    print("choosing one of so many replicas, and reading what one published about so many models:")
    for count in _KNOWN:
        print(f"{count:6} {_choice_us(count):8.1f} µs {_reading_us(count):8.1f} µs")
    print(f"\nnothing is asked for {options.seconds:g} s; CPU seconds a second, MiB")
    for count in options.replicas:
        try:
            for line in _idle(count, options.seconds):
                print(line, flush=True)
        except StartError as error:
            print(f"not measured: {error}", file=sys.stderr)
            return 2
    return 0


def _choice_us(count: int) -> float:
    stats = published({"hot": PublishedModel("awake")}, moving=True)
    meta = {"urls": {"hot": "http://127.0.0.1:1"}, "secret": "s"}
    replicas: list[Replica] = [read_replica(str(number), meta, stats) for number in range(count)]
    in_flight: Counter[str] = Counter()

    def once() -> None:
        choose((replica.target("hot") for replica in replicas), in_flight.__getitem__, ())

    return _best_us(once)


def _reading_us(count: int) -> float:
    stats = published({f"model-{number}": PublishedModel("asleep") for number in range(count)}, moving=True)
    return _best_us(lambda: read_replica("a", {"urls": {}, "secret": "s"}, stats))


def _best_us(once: object) -> float:
    timer = timeit.Timer(once)  # type: ignore[arg-type] # a callable is a statement to it
    number, _ = timer.autorange()
    return min(timer.repeat(3, number)) / number * 1e6


def _idle(count: int, seconds: float) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as scratch, Servers() as servers:
        path = Path(scratch) / "scale.yaml"
        path.write_text(yaml.safe_dump(_document(count)))
        server = servers.service(read_file(path))
        _wait_for(server, count)
        time.sleep(_SETTLE_S)
        groups = roles(server.process.pid)
        cpu = Cpu(groups)
        time.sleep(seconds)
        used = cpu.used()
        for name, pids in sorted(groups.items()):
            now, _ = memory_mib(pids)
            yield f"{count:3} replicas  {name:40} {len(pids):3} processes {used[name] / seconds:7.3f} {now:8.0f}"


def _document(count: int) -> dict[str, object]:
    model = {
        "id": "hot",
        "tier": "resident",
        "context": 4096,
        "replicas": count,
        "resources": {"num_cpus": 0.01},
        "fake": {},
    }
    args = {"log_level": "warning", "router": {"port": 8000, "num_cpus": 0.01, "drain_s": 1}, "models": [model]}
    return {
        "http_options": {"host": "127.0.0.1", "port": 8001},
        "logging_config": {"log_level": "WARNING"},
        "applications": [{"name": "switchyard", "route_prefix": "/", "import_path": IMPORT_PATH, "args": args}],
    }


def _wait_for(server: Server, count: int) -> None:
    """Until every replica has an engine."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        engines = roles(server.process.pid).get("engine of the model replica", [])
        with urllib.request.urlopen(server.url + "/ready", timeout=5) as answer:
            if json.load(answer)["ready"] and len(engines) >= count:
                return
        time.sleep(1)
    raise StartError(f"not all {count} replicas came up")


if __name__ == "__main__":
    raise SystemExit(main())
