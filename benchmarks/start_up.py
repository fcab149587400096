"""Where the time goes from `serve run` to the first token: `make bench-start`.

Each start is a fresh `serve run` of deployments/local.yaml on other ports, in a cluster of its own; nothing is kept
but what the kernel has of the files. The times are when each process began (by the kernel), when the front door first
took a connection, when `/ready` said 200, and when the first text of a streamed answer came. Beside it: a plain start
of vLLM's own server with the same model and settings.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import sys
import threading
import time
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.cold_start import first_token_s
from benchmarks.processes import ROUTER, family
from benchmarks.servers import Servers, StartError
from serve_app.check import read_file
from serve_app.config import ConfigError
from serve_app.model_schema import REPOSITORY

_POLL_S = 0.02
# In the order in which they come, with what their command lines hold.
_PROCESSES = {
    "Ray's first daemon": "gcs_server",
    "Serve's controller": "ServeController",
    ROUTER: ":Router",
    "model replica": ":Resident-",
    "engine host": "serve_app.engines.host",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start_up", description=__doc__)
    parser.add_argument("--config", type=Path, default=REPOSITORY / "deployments" / "local.yaml")
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console(width=100)
    try:
        found = [_start(options.config, console) for _ in range(options.starts)]
        plain_s = _plain_s(options.config)
    except (ConfigError, StartError) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    if options.json:
        options.json.write_text(json.dumps({"starts": found, "plain_s": plain_s}, indent=2) + "\n")
    _report(found, plain_s, console)
    return 0


def _start(config: Path, console: Console) -> dict[str, float]:
    file = read_file(config)
    model = file.config.residents[0]
    answered: list[float] = []
    over = threading.Event()
    with Servers() as servers:
        port = _free_port()
        watcher = threading.Thread(target=_watch_door, args=(port, answered, over), daemon=True)
        watcher.start()
        try:
            server = servers.service(file, port)
        finally:
            over.set()
            watcher.join()
        ready = time.time()
        first_token_s(server, model.id)
        first_token = time.time()
        began = psutil.Process(server.process.pid).create_time()
        times = {
            name: born - began
            for name, mark in _PROCESSES.items()
            if (born := _born(server.process.pid, mark)) is not None
        }
        if answered:
            times["front door answers"] = answered[0] - began
        times |= {"ready": ready - began, "first token": first_token - began}
    console.print(f"first token after {times['first token']:.1f} s", highlight=False)
    return times


def _plain_s(config: Path) -> float:
    file = read_file(config)
    with Servers() as servers:
        began = time.monotonic()
        server = servers.bare(file.config, file.config.residents[0])
        first_token_s(server, file.config.residents[0].id)
        return time.monotonic() - began


def _born(root: int, mark: str) -> float | None:
    """When the first process with this in its command line began."""
    born = []
    for process in family(root):
        with contextlib.suppress(psutil.Error):
            if mark in " ".join(process.cmdline()):
                born.append(process.create_time())
    return min(born, default=None)


def _watch_door(port: int, answered: list[float], over: threading.Event) -> None:
    while not over.wait(_POLL_S):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            answered.append(time.time())
            return


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _report(found: list[dict[str, float]], plain_s: float, console: Console) -> None:
    table = Table("seconds after the command", "median", title=f"{len(found)} starts")
    for name in found[0]:
        table.add_row(name, f"{statistics.median(each[name] for each in found if name in each):.2f}")
    console.print(table)
    median = statistics.median(each["first token"] for each in found)
    console.print(f"vLLM's own server, to its first token: {plain_s:.1f} s; ours is {median / plain_s:.2f} of that")


if __name__ == "__main__":
    sys.exit(main())
