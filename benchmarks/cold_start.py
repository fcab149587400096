"""How long a cold lazy model makes its first client wait, where that time goes, and whether memory creeps.

    make bench-cold                              10 cold starts of the lazy model of deployments/local.yaml
    make bench-cold ARGS="--cycles 50"           50, and the memory of the pool's replica after each
    make bench-cold ARGS="--json out.json"       the raw data too

The claims: the median from request to first token is at most 4.5 s (on the machine for which that was set a plain
start takes 15 s; the one measured here stands beside it), and the replica's memory after the last cycle is within
100 MB of that after the first. Exit status: 0 they hold, 1 one does not, 2 it was not measured.

Method: `serve run` on other ports; before each start the model is unloaded by an operator's order, and the standby
host must have its imports done (an idle machine). The client is a streaming chat request over HTTP; its first token
is the first `data:` line with text. The phases are those that the engine host reports.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.servers import Server, Servers, StartError
from serve_app.check import read_file
from serve_app.config import ConfigError
from serve_app.model_schema import REPOSITORY

MAX_MEDIAN_S = 4.5
MAX_CREEP_MB = 100.0
_POLL_S = 0.1
_PATIENCE_S = 120.0
# A standby host that still imports uses a core; one that waits uses nothing.
_QUIET_CORES = 0.05
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def call(server: Server, path: str, body: object = None, method: str | None = None) -> Any:
    """One JSON request."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        server.url + path, data=data, method=method, headers={"content-type": "application/json"}
    )
    with _direct.open(request, timeout=_PATIENCE_S) as answer:
        return json.load(answer)


def wait_for(server: Server, model: str, state: str) -> dict[str, Any]:
    """The model's card, once it is in this state."""
    deadline = time.monotonic() + _PATIENCE_S
    while (card := call(server, f"/v1/models/{model}"))["state"] != state:
        if time.monotonic() > deadline:
            raise StartError(f"{model} is {card['state']}, not {state}, after {_PATIENCE_S:g} s")
        time.sleep(_POLL_S)
    return dict(card)


def replica(server: Server) -> psutil.Process:
    """The process of the pool's replica."""
    for process in psutil.Process(server.process.pid).children(recursive=True):
        if "ray::" in (title := " ".join(process.cmdline())) and "LazyPool" in title:
            return process
    raise StartError("no replica of the pool was found")


def wait_quiet(pool: psutil.Process) -> None:
    """Until the pool's replica and its standby host do nothing."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        hosts = [child for child in pool.children() if child.is_running()]
        before = sum(sum(host.cpu_times()[:2]) for host in hosts)
        time.sleep(1.0)
        after = sum(sum(host.cpu_times()[:2]) for host in hosts if host.is_running())
        if hosts and after - before < _QUIET_CORES:
            return
    raise StartError("the standby host did not come to rest")


def first_token_s(server: Server, model: str) -> float:
    """Seconds from the request to the first text of a streamed answer."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "stream": True,
        "max_tokens": 8,
        "temperature": 0,
    }
    request = urllib.request.Request(
        server.url + "/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    began, first = time.monotonic(), 0.0
    with _direct.open(request, timeout=_PATIENCE_S) as answer:
        for line in answer:
            if line.startswith(b"data: {") and not first:
                delta = json.loads(line[6:])["choices"][0]["delta"]
                if delta.get("content"):
                    first = time.monotonic() - began
    if not first:
        raise StartError("the stream held no text")
    return first


def measure(server: Server, model: str, cycles: int, console: Console) -> dict[str, Any]:
    """The cold starts, one after the other."""
    pool = replica(server)
    rounds: list[dict[str, Any]] = []
    for number in range(cycles):
        call(server, f"/v1/router/models/{model}/unload", {}, "POST")
        wait_for(server, model, "stopped")
        wait_quiet(pool)
        seconds = first_token_s(server, model)
        card = wait_for(server, model, "awake")
        memory_mb = pool.memory_info().rss / 1e6
        rounds.append({"first_token_s": seconds, "phases": card["load_phases"], "replica_mb": memory_mb})
        console.print(f"{number + 1:3}  first token {seconds:.2f} s   replica {memory_mb:.0f} MB", highlight=False)
    return {"rounds": rounds}


def report(found: dict[str, Any], plain_s: float, console: Console) -> bool:
    """Print the figures; whether the claims hold."""
    rounds = found["rounds"]
    median = statistics.median(entry["first_token_s"] for entry in rounds)
    table = Table("phase", "median s", title="Where the time goes")
    names = list(rounds[0]["phases"])
    phases = {name: statistics.median(entry["phases"].get(name, 0.0) for entry in rounds) for name in names}
    for name, seconds in phases.items():
        table.add_row(name, f"{seconds:.2f}")
    table.add_row("rest: hold, relay, first token", f"{median - sum(phases.values()):.2f}")
    table.add_row("first token at the client", f"{median:.2f}")
    console.print(table)
    creep = rounds[-1]["replica_mb"] - rounds[0]["replica_mb"]
    console.print(f"plain start of vLLM's own server: {plain_s:.1f} s, {plain_s / median:.1f} times as long")
    console.print(f"median first token {median:.2f} s (claim: at most {MAX_MEDIAN_S:g})")
    console.print(f"replica's memory {creep:+.0f} MB over {len(rounds)} cycles (claim: within {MAX_CREEP_MB:g})")
    return bool(median <= MAX_MEDIAN_S and abs(creep) <= MAX_CREEP_MB)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=REPOSITORY / "deployments" / "local.yaml")
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console()
    try:
        file = read_file(args.config)
        model = file.config.lazy[0]
        with Servers() as servers:
            began = time.monotonic()
            servers.bare(file.config, model)
            plain_s = time.monotonic() - began
        with Servers() as servers:
            server = servers.service(file)
            found = measure(server, model.id, args.cycles, console) | {"plain_start_s": plain_s}
    except (ConfigError, StartError) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if report(found, plain_s, console) else 1


if __name__ == "__main__":
    sys.exit(main())
