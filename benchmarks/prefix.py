"""What it gains that a conversation goes back to the replica that has its beginning in its prefix cache.

    make bench-prefix                              two replicas of the real engine, some minutes
    make bench-prefix ARGS="--turns 6 --json out.json"

The claim: median time to first token at least 40 % lower than where replicas are chosen by load alone, which with equal
load is by chance. Exit status: 0 it holds, 1 it does not, 2 it was not measured.

Method: `serve run` of deployments/local.yaml with two replicas of its resident model and no lazy one. 16 conversations
share a system prompt of some 1,000 tokens and have several turns of a short question and a longer answer. `--at-once`
of them run at a time, in an order drawn once, the same for both sides. Each waits for its answer before its next
turn; first turns count, too. The sides take turns, each with a service, and so with caches, of its own, and begin when
both replicas answer.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import yaml
from rich.console import Console

from benchmarks.servers import Server, Servers, StartError
from serve_app.check import read_file
from serve_app.config import ConfigError
from serve_app.model_schema import REPOSITORY

MIN_GAIN = 0.4
_CONVERSATIONS = 16
_REPLICAS = 2
_ANSWER_TOKENS = 96
_QUESTION_WORDS = 40
_PATIENCE_S = 300.0
_WORDS = [
    "river",
    "stone",
    "lamp",
    "winter",
    "market",
    "garden",
    "letter",
    "engine",
    "copper",
    "island",
    "morning",
    "window",
    "silver",
    "road",
    "table",
]
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def text_of(words: int, seed: str) -> str:
    """So many words, about as many tokens; always the same for a seed."""
    draw = random.Random(seed)
    return " ".join(draw.choice(_WORDS) for _ in range(words))


def first_token_s(server: Server, model: str, messages: list[dict[str, str]]) -> tuple[float, str]:
    """Seconds to the first text of a streamed answer, and the answer."""
    # A small model might answer nothing to words without a meaning.
    length = {"max_tokens": _ANSWER_TOKENS, "min_tokens": _ANSWER_TOKENS}
    body = {"model": model, "messages": messages, "stream": True, "temperature": 0, **length}
    request = urllib.request.Request(
        server.url + "/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    began, first, said = time.monotonic(), 0.0, ""
    with _direct.open(request, timeout=_PATIENCE_S) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                piece = (choices[0]["delta"].get("content") if choices else "") or ""
                if piece and not first:
                    first = time.monotonic() - began
                said += piece
    if not first:
        raise StartError("the stream held no text")
    return first, said


def until_awake(server: Server, model: str, replicas: int) -> None:
    """Wait for all of them: a service is ready, and its first requests are answered, as soon as one is."""
    deadline = time.monotonic() + _PATIENCE_S
    with _direct.open(server.url + "/v1/router/events", timeout=_PATIENCE_S) as feed:
        for line in feed:
            if line.startswith(b'data: {"models":['):
                found = next(each for each in json.loads(line[6:])["models"] if each["id"] == model)
                if sum(each["state"] == "awake" for each in found.get("replicas", ())) >= replicas:
                    return
            if time.monotonic() > deadline:
                break
    raise StartError(f"{replicas} replicas of {model} were not awake within {_PATIENCE_S:g} s")


def converse(server: Server, model: str, turns: int, at_once: int) -> list[float]:
    """Every turn's time to first token."""
    system = {"role": "system", "content": text_of(1000, "system")}
    talks: list[list[dict[str, str]]] = [[system] for _ in range(_CONVERSATIONS)]
    found: list[float] = []
    for turn in range(turns):
        order = list(range(_CONVERSATIONS))
        random.Random(turn).shuffle(order)
        waiting: SimpleQueue[int] = SimpleQueue()
        for number in order:
            waiting.put(number)

        def work(turn: int = turn, waiting: SimpleQueue[int] = waiting) -> None:
            while True:
                try:
                    number = waiting.get_nowait()
                except Empty:
                    return
                talk = talks[number]
                talk.append({"role": "user", "content": text_of(_QUESTION_WORDS, f"{number}.{turn}")})
                seconds, said = first_token_s(server, model, talk)
                talk.append({"role": "assistant", "content": said})
                found.append(seconds)

        workers = [threading.Thread(target=work) for _ in range(at_once)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if len(found) != (turn + 1) * _CONVERSATIONS:
            raise StartError("a turn was not answered")
    return found


def config_with(raw: dict[str, Any], *, affine: bool) -> dict[str, Any]:
    """The deployment file for one side."""
    changed = copy.deepcopy(raw)
    args = changed["applications"][0]["args"]
    resident = next(model for model in args["models"] if model["tier"] == "resident")
    args["models"] = [{**resident, "replicas": _REPLICAS}]
    args.setdefault("router", {})["prefix_affinity"] = affine
    return changed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=REPOSITORY / "deployments" / "local.yaml")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    try:
        raw = yaml.safe_load(args.config.read_text())
        for number in range(args.rounds):
            for affine in (True, False) if number % 2 else (False, True):
                with tempfile.TemporaryDirectory() as directory, Servers() as servers:
                    file = Path(directory) / "prefix.yaml"
                    file.write_text(yaml.safe_dump(config_with(raw, affine=affine), sort_keys=False))
                    server = servers.service(read_file(file))
                    model = read_file(file).config.residents[0].id
                    until_awake(server, model, _REPLICAS)
                    found = converse(server, model, args.turns, args.at_once)
                    seconds[affine] += found
                    console.print(f"affinity {affine}: median {statistics.median(found):.3f} s", highlight=False)
    except (ConfigError, StartError) as error:
        console.print(str(error), style="red", markup=False)
        return 2
    with_it, without = statistics.median(seconds[True]), statistics.median(seconds[False])
    gain = 1 - with_it / without
    console.print(f"time to first token, median of {len(seconds[True])}: {with_it:.3f} s with, {without:.3f} s without")
    console.print(f"{gain:.0%} lower (claim: at least {MIN_GAIN:.0%})")
    if args.json:
        args.json.write_text(json.dumps({"with": seconds[True], "without": seconds[False]}, indent=2) + "\n")
    return 0 if gain >= MIN_GAIN else 1


if __name__ == "__main__":
    sys.exit(main())
