"""What clients ask of a service, in about the shares in which they do; `python -m tests.load` runs it.

In Locust's statistics the method of a request says what became of it: `whole`, `left` (the client went away, as it
meant to), `429` and `503` (refusals, which are no failures), `failed`; and `first` is the time to the first token of a
stream. The statistics are written as JSON to `$LOAD_RESULT` at the end.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests
from locust import HttpUser, between, events, task
from locust.clients import ResponseContextManager
from locust.env import Environment

CHAT = "/v1/chat/completions"
_TIMEOUT_S = 300
_LONGEST_PAUSE_S = 5.0
_WORDS = ("one", "model", "stays", "hot", "and", "others", "wake", "when", "somebody", "asks")
_keys = itertools.cycle([key for key in os.environ.get("LOAD_KEYS", "").split(",") if key] or [""])
_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Fault(Exception):
    """What a client must not see; its message is its kind."""


class Left(Exception):
    """The client has read enough."""


class Client(HttpUser):
    """One person or program with a key, who asks, reads the answer, and thinks for a moment.

    Refused, it stays away for as long as it was told to, up to a bound: a run is short.
    """

    abstract = True
    wait_time = between(0.2, 1.5)
    cold: tuple[str, ...] = ()

    def on_start(self) -> None:
        """Take a key, and see which models there are."""
        self.client.trust_env = False
        if key := next(_keys):
            self.client.headers["authorization"] = f"Bearer {key}"
        answer = self.client.get("/v1/models", name="models", timeout=_TIMEOUT_S)
        cards = answer.json()["data"] if answer.status_code == 200 else []
        chats = [card for card in cards if "chat" in card.get("abilities", ())]
        self.cold = tuple(card["id"] for card in chats if card.get("tier") == "lazy")

    def ask(self, name: str, body: dict[str, Any], *, stream: bool, leaves_after: int | None = None) -> None:
        """Send one chat, and read its answer; `leaves_after` so many tokens of a stream."""
        fields = {"max_tokens": 64, **body, "stream": stream}
        began = time.perf_counter()
        with self.client.post(
            CHAT, json=fields, name=name, stream=stream, timeout=_TIMEOUT_S, catch_response=True
        ) as answer:
            method = "whole"
            try:
                if answer.status_code in (429, 503):
                    method = str(answer.status_code)
                    _refusal(answer)
                elif answer.status_code != 200:
                    raise Fault(f"status {answer.status_code}")
                elif stream:
                    self._read(name, answer, began, leaves_after)
                elif not answer.json()["choices"][0]["message"]:
                    raise Fault("no message")
                answer.success()
            except Left:
                method = "left"
                answer.close()
                answer.success()
            except Fault as fault:
                method = "failed"
                answer.failure(fault)
            except (requests.RequestException, ValueError, KeyError, IndexError) as error:
                method = "failed"
                answer.failure(Fault(type(error).__name__))
            answer.request_meta["request_type"] = method
            answer.request_meta["response_time"] = (time.perf_counter() - began) * 1000
            pause_s = min(_LONGEST_PAUSE_S, float(answer.headers.get("retry-after", 0)))
        time.sleep(pause_s)

    def _read(self, name: str, answer: ResponseContextManager, began: float, leaves_after: int | None) -> None:
        tokens = 0
        for event in _events(answer):
            if not any(choice["delta"].get("content") for choice in event["choices"]):
                continue
            tokens += 1
            if tokens == 1:
                took_ms = (time.perf_counter() - began) * 1000
                events.request.fire(
                    request_type="first", name=name, response_time=took_ms, response_length=0, exception=None
                )
            if tokens == leaves_after:
                raise Left


def _refusal(answer: ResponseContextManager) -> None:
    """A refusal says in the usual form why, and when to come again."""
    if not answer.headers.get("retry-after", "").isdigit():
        raise Fault(f"{answer.status_code} without Retry-After")
    if not answer.json()["error"]["code"]:
        raise Fault(f"{answer.status_code} without a code")


def _events(answer: ResponseContextManager) -> Iterator[dict[str, Any]]:
    """The events of a stream. Raises `Fault` for one that ends before its end, or in an error."""
    for line in answer.iter_lines():
        if line == b"data: [DONE]":
            return
        if line.startswith(b"data: "):
            event = json.loads(line[6:])
            if "error" in event:
                raise Fault(f"event {event['error']['code']}")
            yield event
    raise Fault("cut stream")


def _text(words: int) -> str:
    # Another beginning each time: else the prefix cache would answer.
    return f"{random.randrange(10**9)} " + " ".join(random.choices(_WORDS, k=words))


def _asking(words: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": _text(words)}]


class Chat(Client):
    """Short questions; each second one is streamed."""

    weight = 6

    @task
    def chat(self) -> None:
        """One question."""
        self.ask("chat", {"messages": _asking(random.randrange(5, 60))}, stream=random.random() < 0.5)


class LongPrompt(Client):
    """Documents of some thousand words, and a short answer."""

    weight = 1

    @task
    def long_prompt(self) -> None:
        """One document."""
        self.ask("long prompt", {"messages": _asking(1200), "max_tokens": 16}, stream=False)


class Agent(Client):
    """A tool loop: the question, and then what the tool said."""

    weight = 2

    @task
    def tools(self) -> None:
        """One round of it."""
        asked = _asking(12)
        self.ask("tools", {"messages": asked, "tools": [_WEATHER]}, stream=random.random() < 0.5)
        call = {
            "id": "call_1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
        }
        said = [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "4 °C, rain"},
        ]
        self.ask("tools", {"messages": [*asked, *said], "tools": [_WEATHER]}, stream=random.random() < 0.5)


class Leaver(Client):
    """Reads a few tokens of a stream and goes away."""

    weight = 2

    @task
    def leave(self) -> None:
        """Ask for much, and go."""
        body = {"messages": _asking(20), "max_tokens": 512}
        self.ask("stream that is left", body, stream=True, leaves_after=random.randrange(1, 6))


class ColdModel(Client):
    """Wants a model that may have to be loaded; where there is none, the default one."""

    weight = 1

    @task
    def cold(self) -> None:
        """One question to one of them."""
        model = {"model": random.choice(self.cold)} if self.cold else {}
        self.ask("cold model", {"messages": _asking(10), **model}, stream=random.random() < 0.5)


@events.quitting.add_listener
def write_result(environment: Environment, **_: object) -> None:
    """What was counted, by name and by what became of it. Times in ms."""
    target = os.environ.get("LOAD_RESULT")
    if not target:
        return
    rows = [
        {
            "name": entry.name,
            "method": entry.method,
            "count": entry.num_requests,
            **{f"p{share}": entry.get_response_time_percentile(share / 100) for share in (50, 95, 99)},
        }
        for entry in environment.stats.entries.values()
    ]
    failures = [
        {"name": error.name, "kind": str(error.error), "count": error.occurrences}
        for error in environment.stats.errors.values()
    ]
    Path(target).write_text(json.dumps({"rows": rows, "failures": failures}))
