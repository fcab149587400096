"""Clients that ask without a pause, and check every answer token by token: its text is given by the question."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import aiohttp

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WHOLE = "200"
_NOT_KEPT = b": x-router-conversation: unavailable"
_PATIENCE_S = 60.0
_TURNS = 6
# After a failure, as clients do; also else a Router that is gone would be asked thousands of times.
_PAUSE_S = 0.1


@dataclasses.dataclass(slots=True)
class Seen:
    """One request as its client saw it. Times: `time.monotonic`.

    `outcome`: `200` for a whole and right answer; the status and code of a refusal, such as `503 engine_died`;
    `event` and its code for a stream that ended in an error; `cut` for a connection that broke; `refused` for one
    that was not accepted. Anything else is wrong whatever happened.
    """

    id: str
    kind: str
    stream: bool
    port: int = 0
    began: float = 0.0
    ended: float = 0.0
    outcome: str = ""
    retry_after: str = ""
    conversation: str = ""
    rates: str = ""

    @property
    def allowed(self) -> bool:
        """Whether a client may see this in the worst moment: a clear error, or a broken connection."""
        word = self.outcome.split(" ")[0]
        return word in (WHOLE, "503", "event", "cut", "refused") and (word != "503" or self.retry_after != "")


class Wrong(Exception):
    """An answer that must not be, whatever was killed."""


class _Client:
    """One client with a connection of its own, which it keeps or not, and a conversation that it goes on with."""

    def __init__(self, url: str, key: str, number: int) -> None:
        self._chance = random.Random(number)
        self._number = number
        self._url = url
        self._key = key
        self._port = 0
        self._session_id = ""
        # What the service said that it kept.
        self._turns: list[tuple[str, str]] = []

    def _socket(self, address: tuple[Any, ...]) -> socket.socket:
        made = socket.socket(address[0], address[1], address[2])
        made.bind(("127.0.0.1", 0))
        self._port = made.getsockname()[1]
        return made

    async def run(self, over: threading.Event, seen: list[Seen]) -> None:
        keeps = self._number % 2 == 0
        connector = aiohttp.TCPConnector(limit=1, force_close=not keeps, socket_factory=self._socket)
        timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
        async with aiohttp.ClientSession(self._url, connector=connector, timeout=timeout) as session:
            while not over.is_set():
                one = Seen(uuid.uuid4().hex, self._kind(), self._chance.random() < 0.5)
                await self._ask(session, one)
                seen.append(one)
                await asyncio.sleep(_PAUSE_S if one.outcome != WHOLE else self._chance.random() * _PAUSE_S)

    def _kind(self) -> str:
        # Each fourth client holds a conversation, another fourth wants the lazy model.
        if self._number % 4 == 1:
            return "conversation"
        if self._number % 4 == 2:
            return "lazy"
        return self._chance.choice(["chat", "auto", "completions"])

    async def _ask(self, session: aiohttp.ClientSession, one: Seen) -> None:
        words = [f"q{one.id[:8]}", *(f"w{self._chance.randrange(10**6)}" for _ in range(self._chance.randrange(3, 25)))]
        question = f"fake[text={' '.join(words)}]"
        path = COMPLETIONS if one.kind == "completions" else CHAT
        body: dict[str, Any] = {"stream": one.stream}
        if one.kind == "completions":
            body |= {"prompt": question, "max_tokens": 100}
        else:
            body |= {"messages": [{"role": "user", "content": question}]}
        if one.kind != "auto":
            body["model"] = "lazy" if one.kind == "lazy" else "hot"
        headers = {"authorization": f"Bearer {self._key}", "x-request-id": one.id}
        if one.kind == "conversation":
            if not self._session_id or len(self._turns) >= _TURNS:
                self._session_id, self._turns = uuid.uuid4().hex, []
            headers["x-session-id"] = self._session_id
        one.began = time.monotonic()
        try:
            async with session.post(path, json=body, headers=headers) as answer:
                one.port = self._port
                one.retry_after = answer.headers.get("retry-after", "")
                one.conversation = answer.headers.get("x-router-conversation", "")
                one.rates = answer.headers.get("x-router-rates", "")
                one.outcome, sent = await _read(answer, one, words)
                if one.conversation == "kept" and sent:
                    self._check_memory(sent)
                if one.outcome == WHOLE and one.conversation in ("new", "kept"):
                    self._turns.append((question, " ".join(words)))
        except aiohttp.ClientConnectorError:
            one.outcome = "refused"
        except aiohttp.ClientError:
            one.outcome = "cut"
        except TimeoutError:
            one.outcome = "no answer"
        except Wrong as wrong:
            one.outcome = f"wrong: {wrong}"
        one.port = one.port or self._port
        one.ended = time.monotonic()

    def _check_memory(self, sent: dict[str, Any]) -> None:
        """What the engine got has every turn that was said to be kept, whole and in order."""
        said = [message["content"] for message in sent["messages"]]
        kept = iter(said)
        if not all(text in kept for turn in self._turns for text in turn):
            raise Wrong("a turn that was kept is lost")


async def _read(answer: aiohttp.ClientResponse, one: Seen, words: list[str]) -> tuple[str, dict[str, Any]]:
    """The outcome, and the body that the engine got. Raises `Wrong`."""
    if answer.status != 200:
        raw = await answer.read()
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return f"{answer.status} {json.loads(raw)['error']['code']}", {}
        raise Wrong(f"{answer.status} without an error in our shape")
    if one.stream:
        return await _read_stream(answer, one, words)
    body = await answer.json()
    (choice,) = body["choices"]
    if _text(one, choice, "message") != " ".join(words):
        raise Wrong("another text")
    return WHOLE, body["fake_request"]


async def _read_stream(answer: aiohttp.ClientResponse, one: Seen, words: list[str]) -> tuple[str, dict[str, Any]]:
    expected = [word if place == 0 else " " + word for place, word in enumerate(words)]
    got: list[str] = []
    sent: dict[str, Any] = {}
    finish = fault = ""
    done = False
    async for raw in answer.content:
        line = raw.rstrip(b"\n")
        if line == _NOT_KEPT:
            one.conversation = "unavailable"
        if not line or line.startswith(b":"):
            continue
        if done or not line.startswith(b"data: "):
            raise Wrong("not an event")
        if line == b"data: [DONE]":
            done = True
            continue
        try:
            event = json.loads(line[6:])
        except ValueError:
            raise Wrong("half an event") from None
        if error := event.get("error"):
            fault = str(error["code"])
            continue
        (choice,) = event["choices"]
        sent = event.get("fake_request") or sent
        finish = choice["finish_reason"] or finish
        if token := _text(one, choice, "delta"):
            got.append(token)
            if got != expected[: len(got)]:
                raise Wrong("another token")
    if not done:
        raise Wrong("a stream that just stopped")
    if fault:
        return f"event {fault}", sent
    if got != expected or finish != "stop":
        raise Wrong("a stream that ended well without all of its tokens")
    return WHOLE, sent


def _text(one: Seen, choice: dict[str, Any], part: str) -> str:
    return str((choice["text"] if one.kind == "completions" else choice[part].get("content")) or "")


class Load:
    """The clients, in a thread of their own, from enter to exit; `seen` grows as they go on."""

    def __init__(self, url: str, keys: list[str], clients: int) -> None:
        self.seen: list[Seen] = []
        self._over = threading.Event()
        self._clients = [_Client(url, keys[number % len(keys)], number) for number in range(clients)]
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def _run(self) -> None:
        await asyncio.gather(*(client.run(self._over, self.seen) for client in self._clients))

    def answered_since(self, moment: float) -> int:
        """Whole answers to requests that began after this."""
        return sum(1 for one in self.seen if one.began > moment and one.outcome == WHOLE)


@contextlib.contextmanager
def load(url: str, keys: list[str], clients: int = 16) -> Iterator[Load]:
    """Have clients ask until the end of the block."""
    running = Load(url, keys, clients)
    running._thread.start()
    try:
        yield running
    finally:
        running._over.set()
        running._thread.join()
