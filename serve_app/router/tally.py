"""What one answer cost: read from the engine's own count as the bytes pass by."""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import time
from typing import Any

# In every event that says what the answer cost, and in no other of vLLM's. An answer's text cannot hold it: its
# quotes are escaped.
_KEY = b'"usage":'
_USAGE = b'"usage":{'
# As servers that are not ours may write it.
_SPACED_USAGE = b'"usage": {'
# vLLM's last event before [DONE] where the usage is asked for.
_USAGE_EVENT = b'"choices":[]'
# The same of the Responses API; there it is part of an event that clients need.
_RESPONSE_EVENT = b'"type":"response.completed"'
# And of the Messages API, which says why it ended there, too.
_MESSAGES_EVENT = b'"type":"message_delta"'
_END = b"\n\n"
# A stream ends with why it ended, what it cost and a mark, each perhaps in a piece of its own.
_TAIL_PIECES = 8
_FINISH = re.compile(rb'"finish_reason": ?"([a-z_]{1,32})"')
# How vLLM's answer of /tokenize begins.
_COUNT = re.compile(rb'\{"count":(\d{1,9}),"max_model_len":')
_STOP = re.compile(rb'"stop_reason":"([a-z_]{1,32})"')
_decoder = json.JSONDecoder()


@dataclasses.dataclass(slots=True)
class Tally:
    """Tokens of one answer, and when its first one came (`time.monotonic`). `hides`: the client did not ask for usage.

    0 tokens: the engine has not said. `given`: tokens of a request that is nothing else, whose answer has no count.
    """

    hides: bool = False
    given: int = 0
    prompt: int = 0
    completion: int = 0
    reasoning: int = 0
    cached: int = 0
    first_at: float | None = None
    finish: str = ""
    replica: str = ""
    _tail: collections.deque[bytes] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=_TAIL_PIECES))

    @property
    def total(self) -> int:
        """Tokens of prompt and answer."""
        return self.prompt + self.completion

    def events(self, data: bytes) -> bytes:
        """Look at whole events of a stream; returns what the client is to get of them."""
        if self.first_at is None:
            self.first_at = time.monotonic()
        if not data:
            return data  # half an event: nothing yet, and no piece of the tail
        self._tail.append(data)
        if _KEY not in data:
            return data
        if _RESPONSE_EVENT in data or _MESSAGES_EVENT in data:
            self._read(data)
        if _USAGE_EVENT not in data:
            return data
        self._read(data)
        if not self.hides:
            return data
        return b"".join(event + _END for event in data.split(_END) if event and _USAGE_EVENT not in event)

    def whole(self, body: bytes) -> None:
        """Look at an answer that is not streamed."""
        self.first_at = time.monotonic()
        self._read(body)
        if not self.total:
            # Tokenizing runs no model, and so has no usage; what it went through is counted all the same.
            found = _COUNT.match(body)
            self.prompt = int(found[1]) if found else self.given
        self._tail.append(body)

    def over(self) -> None:
        """The answer has ended."""
        tail = b"".join(self._tail)
        if found := _FINISH.findall(tail) or _STOP.findall(tail):
            self.finish = found[-1].decode()
        self._tail.clear()

    def _read(self, data: bytes) -> None:
        at = data.rfind(_USAGE)
        if at < 0 and (at := data.rfind(_SPACED_USAGE)) < 0:
            return
        try:
            usage, _ = _decoder.raw_decode(data[data.index(b"{", at) :].decode())
        except ValueError:
            return
        prompt, completion = ("input", "output") if "input_tokens" in usage else ("prompt", "completion")
        self.prompt = _number(usage, f"{prompt}_tokens")
        self.completion = _number(usage, f"{completion}_tokens")
        self.reasoning = _number(usage.get(f"{completion}_tokens_details"), "reasoning_tokens")
        self.cached = _number(usage.get(f"{prompt}_tokens_details"), "cached_tokens")
        # Anthropic's `input_tokens` are those that no cache had.
        read, made = _number(usage, "cache_read_input_tokens"), _number(usage, "cache_creation_input_tokens")
        self.prompt += read + made
        self.cached += read


def _number(fields: Any, name: str) -> int:
    value = fields.get(name) if isinstance(fields, dict) else None
    return value if isinstance(value, int) else 0
