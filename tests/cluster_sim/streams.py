"""Clients that stream without a pause, half of them by httpx and half by the openai client, neither trying twice.

Every answer has a text of its own, and is checked token by token.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
import uuid
from typing import Any

import httpx
import openai

from tests.chaos.clients import CHAT, WHOLE, Load, Seen, Stream, Wrong, refusal

try:  # what the openai client is built on since its version 3
    import httpx2 as openai_http
except ImportError:
    openai_http = httpx

CLIENTS = 16
_PATIENCE_S = 60.0
# After a failure, as clients do.
_PAUSE_S = 0.2
# Tokens of an answer; the scripted engine takes 20 ms for each.
_LENGTHS = (20, 250)
_BROKEN = (httpx.TransportError, openai_http.TransportError)


class _Client:
    """One client, with one connection at a time, which it keeps or not. Each fourth asks for the lazy model."""

    def __init__(self, url: str, number: int) -> None:
        self._chance = random.Random(number)
        self._model = "lazy" if number % 4 == 2 else "hot"
        self._ask = self._by_openai if number % 2 else self._by_httpx
        self._headers = {} if number // 2 % 2 else {"connection": "close"}
        self._port = 0
        options: dict[str, Any] = {"timeout": _PATIENCE_S, "trust_env": False}
        options["event_hooks"] = {"request": [self._watched]}
        self._http = httpx.AsyncClient(base_url=url, **options)
        self._openai = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=openai.DefaultAsyncHttpxClient(**options)
        )

    async def _watched(self, request: Any) -> None:
        """Both clients' hook before a request: have its connection's own port told."""
        request.extensions["trace"] = self._connected

    async def _connected(self, event: str, info: dict[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            self._port = info["return_value"].get_extra_info("client_addr")[1]

    async def run(self, over: threading.Event, seen: list[Seen]) -> None:
        async with self._http, self._openai:
            while not over.is_set():
                one = Seen(uuid.uuid4().hex, self._model, stream=True)
                words = [f"q{one.id[:8]}"]
                words += [f"w{self._chance.randrange(10**6)}" for _ in range(self._chance.randint(*_LENGTHS))]
                one.began = time.monotonic()
                try:
                    await self._ask(one, words)
                except (httpx.ConnectError, openai_http.ConnectError):
                    one.outcome = "refused"
                except (httpx.TimeoutException, openai_http.TimeoutException, openai.APITimeoutError):
                    one.outcome = "no answer"
                except _BROKEN:
                    one.outcome = "cut"
                except Wrong as wrong:
                    one.outcome = f"wrong: {wrong}"
                one.port, one.ended = self._port, time.monotonic()
                seen.append(one)
                if one.outcome != WHOLE:
                    await asyncio.sleep(_PAUSE_S)

    def _body(self, words: list[str]) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": f"fake[text={' '.join(words)}]"}],
            "stream": True,
        }

    async def _by_httpx(self, one: Seen, words: list[str]) -> None:
        headers = {"x-request-id": one.id, **self._headers}
        async with self._http.stream("POST", CHAT, json=self._body(words), headers=headers) as answer:
            one.first_byte = time.monotonic()
            if answer.status_code != 200:
                one.retry_after = answer.headers.get("retry-after", "")
                one.outcome = refusal(answer.status_code, await answer.aread())
                return
            stream = Stream(one, words)
            async for line in answer.aiter_lines():
                stream.line(line.encode())
            one.outcome = stream.outcome()

    async def _by_openai(self, one: Seen, words: list[str]) -> None:
        headers = {"x-request-id": one.id, **self._headers}
        got, finish = "", None
        try:
            events = await self._openai.chat.completions.create(**self._body(words), extra_headers=headers)
            one.first_byte = time.monotonic()
            async for event in events:
                (choice,) = event.choices
                got += choice.delta.content or ""
                finish = choice.finish_reason or finish
                if not " ".join(words).startswith(got):
                    raise Wrong("another token")
        except openai.APIStatusError as error:
            one.first_byte = time.monotonic()
            one.retry_after = error.response.headers.get("retry-after", "")
            one.outcome = refusal(error.status_code, error.response.content)
        except openai.APIConnectionError as error:
            # The client's own words for what its HTTP client met.
            raise error.__cause__ or error from None
        except openai.APIError as error:
            one.outcome = f"event {error.code}"
        else:
            if finish != "stop" or got != " ".join(words):
                raise Wrong("a stream that just stopped")
            one.outcome = WHOLE


def streams(url: str, clients: int = CLIENTS) -> Load:
    """These clients, streaming from enter to exit; what is under way then is read to its end."""
    return Load([_Client(url, number) for number in range(clients)])
