"""Closed-loop load on an OpenAI chat endpoint: streams of known length, every one of them checked.

`drive` keeps a number of connections busy: each sends its next request when the last answer is complete. An
answer counts only if it has status 200, `finish_reason: length`, exactly the tokens that were asked for (from
the usage in the last chunk), `[DONE]` and a complete body; anything else is an error with its words.

It speaks HTTP/1.1 by itself over asyncio streams, which costs a small part of what an HTTP client library
does: `Load.client_cpu` says how much, so that a reader can see that the client was not the bottleneck. Only
loopback addresses are accepted.

    python -m benchmarks.loadgen --url http://127.0.0.1:8000 --model smollm2-135m --streams 16
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import ipaddress
import itertools
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from urllib.parse import urlsplit

import orjson
import uvloop

_ANSWER_TIMEOUT_S = 120.0
_ERROR_CHARS = 200
# How far the length of an answer lies from the mean, so that the streams of one run do not march in step.
_SPREAD = 0.25
# Common words, nearly always one token each, so that a prompt's length is about what was asked for.
_WORDS = """
    time year people way day man thing woman life child world school state family student group country
    problem hand part place case week company system program question work government number night point
    home water room mother area money story fact month lot right study book eye job word business issue
    side kind head house service friend father power hour game line end member law car city community
    name president team minute idea body information back parent face others level office door health
    person art war history party result change morning reason research girl guy moment air teacher force
    education
"""


class LoadError(Exception):
    """This load cannot be run at all. The message is for the person who asked for it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """One request: what is sent and how many tokens must come back."""

    prompt: str
    tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """One complete and correct answer. Gaps lie between events that carry tokens."""

    first: bool  # the first one on its connection
    ttft_s: float
    total_s: float
    tokens: int
    prompt_tokens: int
    mean_gap_s: float
    worst_gap_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What one run of the load gave."""

    answers: list[Answer]
    errors: dict[str, int]
    wall_s: float
    client_cpu: float  # cores

    @property
    def tokens(self) -> int:
        """Completion tokens of all answers."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all answers, as the server counted them."""
        return sum(answer.prompt_tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens over the time from the first request to the last byte."""
        return self.tokens / self.wall_s

    @property
    def ttfts_s(self) -> list[float]:
        """Times to first token, without the first answer of each connection.

        Those are all sent in one instant, so at many streams they measure the queue behind one big prefill.
        """
        return [answer.ttft_s for answer in self.answers if not answer.first]


def make_asks(count: int, streams: int, *, prompt_tokens: int, tokens: int, seed: object) -> list[Ask]:
    """Requests with random prompts; equal arguments give equal requests.

    The first `streams` of them have staggered lengths and the others vary around `tokens`: a closed loop of
    equal requests would keep all streams in one batch from beginning to end, as no real load does.
    """
    rng, words = random.Random(repr(seed)), _WORDS.split()
    asks = []
    for index in range(count):
        length = tokens * (index + 1) / streams if index < streams else tokens * rng.uniform(1 - _SPREAD, 1 + _SPREAD)
        prompt = " ".join(rng.choices(words, k=prompt_tokens))
        asks.append(Ask(prompt, max(2, round(length))))
    return asks


async def drive(url: str, model: str, asks: Sequence[Ask], streams: int, *, anew: bool = False) -> Load:
    """Send all requests over `streams` connections. Raises `LoadError` where nothing may or can be sent.

    `anew`: each over one of its own, for a server that keeps none after a stream.
    """
    host, port = loopback(url)
    errors: Counter[str] = Counter()
    answers: list[Answer] = []
    try:
        connections = [await _Connection.open(host, port) for _ in range(min(streams, len(asks)))]
    except OSError as error:
        raise LoadError(f"{url}: {error.strerror or error}") from None
    queue = iter(asks)
    cpu, began = time.process_time(), time.perf_counter()
    await asyncio.gather(*(_work(connection, model, queue, answers, errors, anew=anew) for connection in connections))
    wall_s = time.perf_counter() - began
    return Load(answers, dict(errors), wall_s, (time.process_time() - cpu) / wall_s)


def loopback(url: str) -> tuple[str, int]:
    """Host and port of a base URL. Raises `LoadError` for an address that is not this machine's."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        allowed = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        allowed = False
    if not allowed or parts.scheme != "http" or parts.path.strip("/"):
        raise LoadError(f"{url}: must be http://HOST:PORT with a loopback HOST")
    return host, parts.port or 80


async def _work(
    connection: _Connection,
    model: str,
    queue: Iterator[Ask],
    answers: list[Answer],
    errors: Counter[str],
    *,
    anew: bool,
) -> None:
    first = True
    for ask in queue:
        if anew and not first:
            connection.close()
            connection = await _Connection.open(connection.host, connection.port)
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                answers.append(await connection.ask(model, ask, first=first))
        except (OSError, EOFError, ValueError, KeyError, TimeoutError) as error:
            errors[f"{type(error).__name__}: {error}"[:_ERROR_CHARS]] += 1
            connection.close()
            try:
                connection = await _Connection.open(connection.host, connection.port)
            except OSError as refused:
                errors[f"connection: {refused.strerror or refused}"] += 1
                break
        first = False
    connection.close()


class _Bad(ValueError):
    """An answer that is not what it should be."""


class _Connection:
    """One kept-alive connection."""

    def __init__(self, host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.host, self.port = host, port
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, host: str, port: int) -> _Connection:
        return cls(host, port, *await asyncio.open_connection(host, port))

    def close(self) -> None:
        self._writer.close()

    async def ask(self, model: str, ask: Ask, *, first: bool) -> Answer:
        """Send one request and read its answer to the end. Raises `_Bad` for a wrong one."""
        body = orjson.dumps(
            {
                "model": model,
                "messages": [{"role": "user", "content": ask.prompt}],
                "max_tokens": ask.tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self.host}:{self.port}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        began = time.perf_counter()
        self._writer.write(head.encode() + body)
        status, headers = await self._head()
        if status != 200:
            text = b"".join([data async for data in self._body(headers)]).decode(errors="replace")
            raise _Bad(f"HTTP {status}: {text}")
        times, finish, usage, done = [], None, None, False
        async for event in _events(self._body(headers)):
            now = time.perf_counter()
            if done:
                raise _Bad("something after [DONE]")
            if event == b"[DONE]":
                done = True
                continue
            data = orjson.loads(event)
            if "error" in data:
                raise _Bad(f"error event: {event.decode(errors='replace')}")
            usage = data.get("usage") or usage
            for choice in data["choices"]:
                finish = choice.get("finish_reason") or finish
                if choice["delta"].get("content"):
                    times.append(now)
        ended = time.perf_counter()
        if not done:
            raise _Bad("no [DONE]")
        if not usage or usage["completion_tokens"] != ask.tokens or finish != "length":
            raise _Bad(f"wanted {ask.tokens} tokens, got finish_reason {finish} and usage {usage}")
        if not times:
            raise _Bad("no text in the stream")
        gaps = [after - before for before, after in itertools.pairwise(times)]
        return Answer(
            first=first,
            ttft_s=times[0] - began,
            total_s=ended - began,
            tokens=ask.tokens,
            prompt_tokens=usage["prompt_tokens"],
            mean_gap_s=statistics.fmean(gaps) if gaps else 0.0,
            worst_gap_s=max(gaps, default=0.0),
        )

    async def _head(self) -> tuple[int, dict[str, str]]:
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines[1:] if line)
        return int(lines[0].split(" ", 2)[1]), {name.lower(): value.strip() for name, _, value in pairs}

    async def _body(self, headers: dict[str, str]) -> AsyncIterator[bytes]:
        if headers.get("transfer-encoding", "").lower() != "chunked":
            if "content-length" not in headers:
                raise _Bad("a body without a length")
            yield await self._reader.readexactly(int(headers["content-length"]))
            return
        while True:
            size = int((await self._reader.readuntil(b"\r\n")).partition(b";")[0], 16)
            data = await self._reader.readexactly(size + 2)
            if not size:
                return
            yield data[:-2]


async def _events(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each server-sent event; comments are left out."""
    pending = b""
    async for data in body:
        *blocks, pending = (pending + data).split(b"\n\n")
        for block in blocks:
            if block.startswith(b"data: "):
                yield block[6:]
            elif not block.startswith(b":"):
                raise _Bad(f"not an event: {block[:80]!r}")
    if pending.strip():
        raise _Bad("an event is cut off")


def main() -> int:
    """Run one load and print what it gave as JSON. Status 1 if there was an error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loadgen", description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True, help="http://127.0.0.1:PORT")
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, default=1, help="connections (default 1)")
    parser.add_argument("--requests", type=int, default=16, help="in all (default 16)")
    parser.add_argument("--tokens", type=int, default=64, help="mean length of an answer (default 64)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="about this many (default 64)")
    parser.add_argument("--seed", type=int, help="for the same prompts again (default: new ones)")
    options = parser.parse_args()
    seed = time.time_ns() if options.seed is None else options.seed
    asks = make_asks(
        options.requests,
        options.streams,
        prompt_tokens=options.prompt_tokens,
        tokens=options.tokens,
        seed=seed,
    )
    try:
        load = uvloop.run(drive(options.url, options.model, asks, options.streams))
    except LoadError as error:
        print(error, file=sys.stderr)
        return 2
    summary = {
        "answers": len(load.answers),
        "errors": load.errors,
        "tokens_per_s": round(load.tokens_per_s, 2),
        "client_cpu": round(load.client_cpu, 3),
    }
    if load.answers:
        ttfts_s = load.ttfts_s or [answer.ttft_s for answer in load.answers]
        summary |= {
            "ttft_p50_ms": round(statistics.median(ttfts_s) * 1000, 2),
            "gap_mean_p50_ms": round(statistics.median(answer.mean_gap_s for answer in load.answers) * 1000, 2),
            "worst_gap_ms": round(max(answer.worst_gap_s for answer in load.answers) * 1000, 2),
        }
    print(json.dumps(summary))
    return 1 if load.errors else 0


if __name__ == "__main__":
    sys.exit(main())
