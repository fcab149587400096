"""What `shape` does to answers of chats, done to those of the Messages API, whose text is in numbered blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from serve_app.router.shape import first_stop, maybe_stop, misplaced, repair, whole_object
from serve_app.routing.decision import Decision
from serve_app.routing.facts import Facts
from serve_app.routing.outgoing import stops_of

_DATA = b"\ndata: "
_END = b"\n\n"
_FINISH = {"max_tokens": "length", "tool_use": "tool_calls"}

Event = dict[str, Any]


class MessagesShape:
    """One object for one answer. The reasoning has but one name here: it is a block of its own."""

    def __init__(self, *, tools: bool = False, stops: Sequence[str] = ()) -> None:
        self._tools = tools
        self._stops = stops
        self._held = ""
        self._stopped: str | None = None
        self._kinds: dict[int, str] = {}
        self._thought = ""
        # Blocks that came after the stop string, and so do not exist.
        self._dropped: set[int] = set()

    def whole(self, body: bytes) -> bytes:
        """An answer that is not streamed."""
        if not (self._tools or self._stops):
            return body
        answer = whole_object(body)
        blocks = answer.get("content") or []
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        thought = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
        calls = [block for block in blocks if block["type"] == "tool_use"]
        if self._tools and not calls:
            message: dict[str, Any] = {"content": text, "reasoning": thought}
            choice = {"finish_reason": _FINISH.get(str(answer.get("stop_reason")), "stop")}
            repair(message, choice)
            text, calls = message["content"] or "", [_tool_use(call) for call in message.get("tool_calls", ())]
        if found := first_stop(text, self._stops):
            text, calls = text[: found[0]], []
            answer["stop_reason"], answer["stop_sequence"] = "stop_sequence", found[1]
        said = [{"type": "text", "text": text}] if text or not (thought or calls) else []
        answer["content"] = [*(block for block in blocks if block["type"] not in ("text", "tool_use")), *said, *calls]
        return orjson.dumps(answer)

    def events(self, data: bytes) -> bytes:
        """Whole events of a stream."""
        if not (self._tools or self._stops):
            return data
        return b"".join(_written(event) for raw in data.split(_END) if raw for event in self._event(raw))

    def _event(self, raw: bytes) -> Iterator[Event]:
        head, _, line = raw.partition(_DATA)
        if not line or not head.startswith(b"event: "):
            return
        event = whole_object(line)
        index = event.get("index", 0)
        match event.get("type"):
            case "content_block_start":
                if self._stopped is not None:
                    self._dropped.add(index)
                self._kinds[index] = event["content_block"]["type"]
            case "content_block_delta":
                event = self._delta(event, event["delta"])
            case "content_block_stop" if self._held:
                yield _text(index, self._held)
                self._held = ""
            case "message_delta":
                yield from self._last(event["delta"])
        if event and index not in self._dropped:
            yield event

    def _delta(self, event: Event, delta: dict[str, Any]) -> Event:
        """The event with what the client may have of it; empty: nothing yet."""
        if delta["type"] == "thinking_delta" and self._tools:
            self._thought += delta["thinking"]
        if delta["type"] != "text_delta" or not self._stops:
            return event
        if self._stopped is not None:
            return {}
        text = self._held + delta["text"]
        if found := first_stop(text, self._stops):
            at, self._stopped = found
            shown, self._held = text[:at], ""
        else:
            shown = text[: len(text) - maybe_stop(text, self._stops)]
            self._held = text[len(shown) :]
        return {**event, "delta": {**delta, "text": shown}} if shown else {}

    def _last(self, delta: dict[str, Any]) -> Iterator[Event]:
        """How the answer ended; before it a call that was written into the thought."""
        if self._stopped is not None:
            delta["stop_reason"], delta["stop_sequence"] = "stop_sequence", self._stopped
            return
        said_nothing = delta.get("stop_reason") == "end_turn" and set(self._kinds.values()) <= {"thinking"}
        if self._tools and said_nothing and (text := misplaced(self._thought)):
            index = len(self._kinds)
            block = {"type": "text", "text": ""}
            yield {"type": "content_block_start", "index": index, "content_block": block}
            yield _text(index, text)
            yield {"type": "content_block_stop", "index": index}


def _text(index: int, text: str) -> Event:
    return {"type": "content_block_delta", "index": index, "delta": {"type": "text_delta", "text": text}}


def _written(event: Event) -> bytes:
    return b"event: " + str(event["type"]).encode() + _DATA + orjson.dumps(event) + _END


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {
        "type": "tool_use",
        "id": call["id"],
        "name": function["name"],
        "input": orjson.loads(function["arguments"]),
    }


def messages_shape_of(facts: Facts, decision: Decision) -> MessagesShape:
    """What this request's answer needs."""
    choice = facts.chat.get("tool_choice")
    return MessagesShape(
        tools=bool(facts.chat.get("tools")) and choice != "none",
        stops=stops_of(facts, decision),
    )
