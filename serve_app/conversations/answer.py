"""Puts together what is kept of an answer while its bytes pass, and only if it ended well. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol

import orjson

from serve_app.conversations.history import Item

DONE = b"[DONE]"
_END = b"\n\n"
_DATA = b"data: "
_ENDED_WELL = frozenset({"stop", "length", "tool_calls"})
_RESPONSE_ENDS = frozenset({"response.completed", "response.incomplete"})


class Answer(Protocol):
    """One answer on its way. `ended`: nothing more is expected, and what there is is whole and good."""

    ended: bool

    def event(self, data: bytes) -> None:
        """Take in the data of one event of a stream."""
        ...

    def whole(self, body: bytes) -> None:
        """Take in an answer that is not streamed."""
        ...


class Events:
    """Cuts a stream into the data of its events, however its bytes come."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The events that are whole now."""
        *whole, self._rest = (self._rest + chunk).split(_END)
        for block in whole:
            for line in block.split(b"\n"):
                if line.startswith(_DATA):
                    yield line[len(_DATA) :]


@dataclasses.dataclass(slots=True)
class _Call:
    id: str = ""
    name: str = ""
    arguments: str = ""


class ChatAnswer:
    """A chat completion's first choice. Reasoning is not kept: no model wants its old thoughts back."""

    def __init__(self) -> None:
        self.ended = False
        self.message: Item | None = None
        self._content = ""
        self._calls: dict[int, _Call] = {}
        self._finish: str | None = None
        self._faulty = False

    def event(self, data: bytes) -> None:
        """See `Answer`."""
        if data == DONE:
            self._end()
            return
        chunk = _object(data) or {}
        self._faulty = self._faulty or "choices" not in chunk
        for choice in chunk.get("choices") or ():
            if choice.get("index", 0) == 0:
                self._delta(choice.get("delta") or {})
                self._finish = choice.get("finish_reason") or self._finish

    def whole(self, body: bytes) -> None:
        """See `Answer`."""
        for choice in (_object(body) or {}).get("choices") or ():
            if choice.get("index", 0) == 0:
                message = choice.get("message") or {}
                self._delta({**message, "tool_calls": _numbered(message.get("tool_calls"))})
                self._finish = choice.get("finish_reason")
        self._end()

    def _delta(self, delta: dict[str, Any]) -> None:
        self._content += delta.get("content") or ""
        for piece in delta.get("tool_calls") or ():
            call = self._calls.setdefault(piece.get("index", 0), _Call())
            function = piece.get("function") or {}
            call.id = piece.get("id") or call.id
            call.name = function.get("name") or call.name
            call.arguments += function.get("arguments") or ""

    def _end(self) -> None:
        calls = [_as_message(call) for _, call in sorted(self._calls.items()) if _is_whole(call)]
        if self._faulty or self._finish not in _ENDED_WELL or not (self._content or calls):
            return
        self.message = {"role": "assistant", "content": self._content or None}
        if calls:
            self.message["tool_calls"] = calls
        self.ended = True


class ResponseAnswer:
    """A response object, and the items of its output that later turns are given."""

    def __init__(self) -> None:
        self.ended = False
        self.response: dict[str, Any] = {}

    def event(self, data: bytes) -> None:
        """See `Answer`."""
        # Cheaper than to parse every piece of text that passes.
        if any(name.encode() in data for name in _RESPONSE_ENDS):
            event = _object(data) or {}
            if event.get("type") in _RESPONSE_ENDS:
                self._take(event.get("response"))

    def whole(self, body: bytes) -> None:
        """See `Answer`."""
        self._take(_object(body))

    def _take(self, response: object) -> None:
        if isinstance(response, dict) and response.get("status") in ("completed", "incomplete") and response.get("id"):
            self.response = response
            self.ended = True

    @property
    def items(self) -> list[Item]:
        """The output without reasoning, and without calls that were cut off."""
        return [
            item
            for item in self.response.get("output") or ()
            if isinstance(item, dict)
            and item.get("type") != "reasoning"
            and (item.get("type") != "function_call" or _is_object(item.get("arguments")))
        ]


def _numbered(calls: object) -> list[dict[str, Any]]:
    return [{**call, "index": index} for index, call in enumerate(calls)] if isinstance(calls, list) else []


def _as_message(call: _Call) -> Item:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments or "{}"}}


def _is_whole(call: _Call) -> bool:
    """An answer that was cut off may end in the middle of a call; templates refuse half of one."""
    return bool(call.id and call.name and _is_object(call.arguments or "{}"))


def _is_object(text: object) -> bool:
    return isinstance(text, str) and _object(text.encode()) is not None


def _object(raw: bytes) -> dict[str, Any] | None:
    try:
        parsed = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    return parsed if isinstance(parsed, dict) else None
