"""The router against a llama.cpp server with one slot, as Ollama runs by default: `make bench-one-slot`.

The claim: on the same model, tokens per second over all clients are at least 2.5 times as many at 16 clients, and 3
times at 32. Exit status: 0 it holds, 1 it does not, 2 it was not measured.

Method: the router is `serve run` of deployments/local.yaml, with vLLM on its bf16 weights. llama.cpp has the file that
these were made from, SmolLM2-135M in 4 bits (Q4_1), which is the faster one for it, and all cores. Both are up; one is
loaded at a time, in turns, with the same prompts and answer lengths; every answer is checked (`loadgen`). `--slots`
gives llama.cpp more. Only on a quiet machine: its threads wait for each other.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.loadgen import Load, LoadError, drive, make_asks
from benchmarks.servers import Server, Servers, StartError
from serve_app.check import read_file
from serve_app.config import ConfigError
from serve_app.fetch import FetchError, smollm2_gguf
from serve_app.model_schema import REPOSITORY

WANTED = {16: 2.5, 32: 3.0}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.one_slot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=3, help="of each client in a round")
    parser.add_argument("--tokens", type=int, default=64, help="mean length of an answer")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="about this many")
    parser.add_argument("--slots", type=int, default=1)
    options = parser.parse_args()
    console = Console(width=100)
    found: dict[int, dict[str, list[float]]] = {}
    try:
        file = read_file(REPOSITORY / "deployments" / "local.yaml")
        model = file.config.residents[0].id
        with tempfile.TemporaryDirectory() as scratch, Servers() as servers:
            gguf = smollm2_gguf(Path(scratch), console)
            sides = {"llama.cpp": servers.llama(gguf, options.slots), "router": servers.service(file)}
            for server in sides.values():
                _ask(server, model, options, clients=4, seed="warm")
            for number in range(options.rounds):
                order = list(sides) if number % 2 == 0 else list(reversed(sides))
                for clients in options.clients:
                    for side in order:
                        load = _ask(sides[side], model, options, clients, (number, clients))
                        found.setdefault(clients, {}).setdefault(side, []).append(load.tokens_per_s)
                        console.print(
                            f"{clients:3} clients  {side:10} {load.tokens_per_s:7.1f} tokens/s", highlight=False
                        )
    except (ConfigError, FetchError, StartError, LoadError) as error:
        console.print(f"not measured: {error}", style="red", markup=False)
        return 2
    return 0 if _report(found, options.slots, console) else 1


def _ask(server: Server, model: str, options: argparse.Namespace, clients: int, seed: object) -> Load:
    asks = make_asks(
        clients * options.requests, clients, prompt_tokens=options.prompt_tokens, tokens=options.tokens, seed=seed
    )
    load = uvloop.run(drive(server.url, model, asks, clients, anew=True))
    if load.errors:
        raise LoadError(f"{server.name} answers wrongly: {'; '.join(load.errors)}")
    return load


def _report(found: dict[int, dict[str, list[float]]], slots: int, console: Console) -> bool:
    table = Table("clients", f"llama.cpp, {slots} slot(s): tokens/s", "router: tokens/s", "times as many", "wanted")
    holds = True
    for clients, sides in found.items():
        ratio = statistics.median(
            ours / theirs for ours, theirs in zip(sides["router"], sides["llama.cpp"], strict=True)
        )
        wanted = WANTED.get(clients) if slots == 1 else None
        holds = holds and (wanted is None or ratio >= wanted)
        medians = [f"{statistics.median(sides[side]):.1f}" for side in ("llama.cpp", "router")]
        table.add_row(str(clients), *medians, f"{ratio:.2f}", "" if wanted is None else f"≥ {wanted}")
    console.print(table)
    return holds


if __name__ == "__main__":
    sys.exit(main())
