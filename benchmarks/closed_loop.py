"""Closed-loop load on a chat endpoint that answers with known words: every token of every reply is checked.

Each connection sends its next request when the last reply is complete. `loadgen` asks real engines, whose words
nobody knows, and reads every event as JSON; this one is for servers that answer thousands of times a second, and reads
a reply once it is complete. Only loopback addresses.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections import Counter
from typing import cast

import orjson

from benchmarks.instant_engine import words
from benchmarks.loadgen import loopback

_DRAIN_S = 30.0
_ERROR_CHARS = 200
_CONTENT = re.compile(rb'"content":"((?: ?t\d{3})+)"')
_CHUNKED = b"transfer-encoding: chunked"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)")
_TOKEN = b'"content":"'
_EMPTY = b'"content":""'
_END = b"data: [DONE]\n\n"


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """One kind of request."""

    name: str
    tokens: int
    stream: bool = False
    pace_s: float = 0.0

    def request(self, model: str, host: str) -> bytes:
        """The request as it goes over the wire."""
        script = f"fake[tokens={self.tokens},tpot_s={self.pace_s}]"
        body = {
            "model": model,
            "messages": [{"role": "user", "content": f"Say something short about load balancers. {script}"}],
            "max_tokens": self.tokens,
        }
        raw = orjson.dumps(body | ({"stream": True} if self.stream else {}))
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(raw)}\r\n\r\n"
        )
        return head.encode() + raw


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """The times of one right reply, in seconds. `worst_gap_s`: between two reads that brought tokens."""

    ttft_s: float
    total_s: float
    worst_gap_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What one load gave."""

    kind: Kind
    connections: int
    replies: list[Reply]
    errors: dict[str, int]
    wall_s: float

    @property
    def per_s(self) -> float:
        """Replies a second."""
        return len(self.replies) / self.wall_s


class Load:
    """One load on one server. Start it, wait for `seconds`, and let what is under way end."""

    def __init__(self, url: str, model: str, kind: Kind, connections: int) -> None:
        self.host, self.port = loopback(url)
        self.kind = kind
        self.connections = connections
        self.request = kind.request(model, f"{self.host}:{self.port}")
        self.expected = b"".join(words(kind.tokens))
        self.replies: list[Reply] = []
        self.errors: Counter[str] = Counter()
        self.stopping = False
        self.idle = asyncio.Event()
        self.open = 0

    async def run(self, seconds: float, *, apart_s: float = 0.0) -> Run:
        """Load it for so long. `apart_s`: between the beginnings of two connections."""
        began = time.perf_counter()
        for number in range(self.connections):
            await asyncio.sleep(began + number * apart_s - time.perf_counter())
            await self.connect()
        await asyncio.sleep(seconds)
        self.stopping = True
        try:
            async with asyncio.timeout(_DRAIN_S):
                while self.open:
                    self.idle.clear()
                    await self.idle.wait()
        except TimeoutError:
            self.errors["no complete reply"] += self.open
        return Run(self.kind, self.connections, self.replies, dict(self.errors), time.perf_counter() - began)

    async def connect(self) -> None:
        """Open one more connection, which begins at once."""
        await asyncio.get_running_loop().create_connection(lambda: _Connection(self), self.host, self.port)

    def problem(self, raw: bytes) -> str:
        """What is wrong with a reply; empty if it is right."""
        head, _, rest = raw.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            return f"{head[:40]!r}: {rest[:120]!r}"
        body = _joined(rest) if _CHUNKED in head.lower() else rest
        if b"".join(_CONTENT.findall(body)) != self.expected:
            return f"wrong tokens: {body[:120]!r}"
        if self.kind.stream and not (body.endswith(_END) and body.count(_END) == 1):
            return "does not end with one [DONE]"
        return ""


def _joined(raw: bytes) -> bytes:
    """A chunked body without its frames. Raises `ValueError` for one that is not whole."""
    parts: list[bytes] = []
    at = 0
    while True:
        line = raw.index(b"\r\n", at)
        size = int(raw[at:line], 16)
        if not size:
            return b"".join(parts)
        parts.append(raw[line + 2 : line + 2 + size])
        at = line + 2 + size + 2


class _Connection(asyncio.Protocol):
    def __init__(self, load: Load) -> None:
        self._load = load
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []
        self._began = self._first = self._last = self._worst = 0.0
        self._needed: int | None = None
        self._size = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._load.open += 1
        self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if self._parts or not self._load.stopping:
            self._load.errors["the connection broke"] += 1
        self._load.open -= 1
        self._load.idle.set()

    def _send(self) -> None:
        assert self._transport
        self._parts, self._size, self._needed = [], 0, None
        self._first = self._last = self._worst = 0.0
        self._began = time.perf_counter()
        self._transport.write(self._load.request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self._parts:
            self._needed = _length(data)
        self._parts.append(data)
        self._size += len(data)
        if data.count(_TOKEN) > data.count(_EMPTY):
            if self._last:
                self._worst = max(self._worst, now - self._last)
            else:
                self._first = now
            self._last = now
        if self._size >= self._needed if self._needed else self._ends():
            self._over(now)

    def _ends(self) -> bool:
        tail = self._parts[-1]
        if len(tail) < 5 and len(self._parts) > 1:
            tail = self._parts[-2] + tail
        return tail.endswith(b"\r\n0\r\n\r\n") or tail == b"0\r\n\r\n"

    def _over(self, now: float) -> None:
        load = self._load
        try:
            problem = load.problem(b"".join(self._parts))
        except ValueError as error:
            problem = str(error)
        if problem:
            load.errors[problem[:_ERROR_CHARS]] += 1
        else:
            load.replies.append(Reply((self._first or now) - self._began, now - self._began, self._worst))
        self._parts = []
        if load.stopping:
            assert self._transport
            self._transport.close()
        else:
            self._send()


def _length(first: bytes) -> int | None:
    """The size of the whole reply, head and all, where the head says it."""
    head, ended, _ = first.partition(b"\r\n\r\n")
    found = _LENGTH.search(head.lower()) if ended else None
    return len(head) + 4 + int(found[1]) if found else None
