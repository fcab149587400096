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
from collections.abc import Sequence
from typing import Any, Protocol

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
    # When the status came; 0: it never did.
    first_byte: float = 0.0
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

    @property
    def phase(self) -> str:
        """How far a broken connection had come; a status and an event say it themselves."""
        return {"cut": "mid-stream" if self.first_byte else "before the first byte"}.get(self.outcome, "")


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
                one.first_byte = time.monotonic()
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
        return refusal(answer.status, await answer.read()), {}
    if one.stream:
        return await _read_stream(answer, one, words)
    body = await answer.json()
    (choice,) = body["choices"]
    if _text(one, choice, "message") != " ".join(words):
        raise Wrong("another text")
    return WHOLE, body["fake_request"]


def refusal(status: int, body: bytes) -> str:
    """The outcome of an answer that is none. Raises `Wrong`."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return f"{status} {json.loads(body)['error']['code']}"
    raise Wrong(f"{status} without an error in our shape")


async def _read_stream(answer: aiohttp.ClientResponse, one: Seen, words: list[str]) -> tuple[str, dict[str, Any]]:
    stream = Stream(one, words)
    async for raw in answer.content:
        stream.line(raw.rstrip(b"\n"))
    return stream.outcome(), stream.sent


class Stream:
    """Checks the lines of one streamed answer as they come. Raises `Wrong`."""

    def __init__(self, one: Seen, words: list[str]) -> None:
        self._one = one
        self._expected = [word if place == 0 else " " + word for place, word in enumerate(words)]
        self._got: list[str] = []
        self._finish = self._fault = ""
        self._done = False
        # The body that the engine got.
        self.sent: dict[str, Any] = {}

    def line(self, line: bytes) -> None:
        """One more line, without its end."""
        if line == _NOT_KEPT:
            self._one.conversation = "unavailable"
        if not line or line.startswith(b":"):
            return
        if self._done or not line.startswith(b"data: "):
            raise Wrong("not an event")
        if line == b"data: [DONE]":
            self._done = True
            return
        try:
            event = json.loads(line[6:])
        except ValueError:
            raise Wrong("half an event") from None
        if error := event.get("error"):
            self._fault = str(error["code"])
            return
        (choice,) = event["choices"]
        self.sent = event.get("fake_request") or self.sent
        self._finish = choice["finish_reason"] or self._finish
        if token := _text(self._one, choice, "delta"):
            self._got.append(token)
            if self._got != self._expected[: len(self._got)]:
                raise Wrong("another token")

    def outcome(self) -> str:
        """What it was, now that it has ended."""
        if not self._done:
            raise Wrong("a stream that just stopped")
        if self._fault:
            return f"event {self._fault}"
        if self._got != self._expected or self._finish != "stop":
            raise Wrong("a stream that ended well without all of its tokens")
        return WHOLE


def _text(one: Seen, choice: dict[str, Any], part: str) -> str:
    return str((choice["text"] if one.kind == "completions" else choice[part].get("content")) or "")


class Asks(Protocol):
    """A client of a load."""

    async def run(self, over: threading.Event, seen: list[Seen]) -> None:
        """Ask until it is over, and put down what was seen."""


class Load:
    """Clients, in a thread of their own, from enter to exit; `seen` grows as they go on."""

    def __init__(self, clients: Sequence[Asks]) -> None:
        self.seen: list[Seen] = []
        self._over = threading.Event()
        self._clients = clients
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def _run(self) -> None:
        await asyncio.gather(*(client.run(self._over, self.seen) for client in self._clients))

    def answered_since(self, moment: float) -> int:
        """Whole answers to requests that began after this."""
        return sum(1 for one in self.seen if one.began > moment and one.outcome == WHOLE)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()


def load(url: str, keys: list[str], clients: int = 16) -> Load:
    """These clients, asking from enter to exit."""
    return Load([_Client(url, keys[number % len(keys)], number) for number in range(clients)])
