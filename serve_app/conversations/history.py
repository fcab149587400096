"""What of a conversation a request is given, and what of it and its answer is kept. Pure.

One request with its answer is an entry. A turn is an entry and those that go on with it by answering its tool
calls; it is kept whole or not at all. The same code serves both forms: chat messages (`messages`) and Responses items
(`input`), which differ only in how they say that a tool is called and what it answered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from serve_app.routing.excerpt import text_of, tokens_in

Item = dict[str, Any]

SYSTEM_ROLES = frozenset({"system", "developer"})
# The chat template's own tokens.
_TOKENS_PER_ITEM = 5
# Images have no text; so many bytes of anything weigh at least a token, and `max_tokens` bounds memory, too.
_BYTES_PER_TOKEN = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """What one request added: its items and the answer's. `continues`: it begins with the answers of tools."""

    id: str
    items: tuple[Item, ...]
    tokens: int
    continues: bool

    def encode(self) -> bytes:
        """For a store: what trimming asks for comes first, so that a script in Redis can read it."""
        return b"%d:%d:%s:%s" % (self.tokens, self.continues, self.id.encode(), orjson.dumps(self.items))

    @classmethod
    def decode(cls, raw: bytes) -> Entry:
        """Raises `ValueError` for what is none."""
        tokens, continues, entry_id = cls.label(raw)
        return cls(entry_id, tuple(orjson.loads(raw.split(b":", 3)[3])), tokens, continues)

    @staticmethod
    def label(raw: bytes) -> tuple[int, bool, str]:
        """Tokens, whether it continues another, and id of an encoded entry. Raises `ValueError`."""
        tokens, continues, entry_id, _ = raw.split(b":", 3)
        return int(tokens), continues == b"1", entry_id.decode()


@dataclasses.dataclass(frozen=True, slots=True)
class Merged:
    """The items for the engine. `turns`: how many old turns are among them; `dropped`: how many had no room."""

    items: list[Item]
    turns: int
    dropped: int


def entry_of(entry_id: str, items: Sequence[Item]) -> Entry:
    """An entry of these items. Raises `orjson.JSONEncodeError` for what no JSON can hold."""
    size = len(orjson.dumps(items))
    tokens = max(tokens_of(items), size // _BYTES_PER_TOKEN)
    return Entry(entry_id, tuple(items), tokens, bool(items) and _answered(items[0]) is not None)


def keeps_own_history(messages: Sequence[Item]) -> bool:
    """Whether the client itself sends what was said before: an assistant's turn, or more than one user's."""
    roles = [message["role"] for message in messages]
    return "assistant" in roles or roles.count("user") > 1


def is_readable(messages: object) -> bool:
    """Whether these are messages at all; what is wrong with others is said where bodies are checked."""
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages)
    )


def split_system(messages: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """The system messages, and the others."""
    system = [message for message in messages if message["role"] in SYSTEM_ROLES]
    return system, [message for message in messages if message["role"] not in SYSTEM_ROLES]


def turns_of(entries: Iterable[Entry]) -> list[list[Entry]]:
    """The entries as turns, in the order in which they were last gone on with.

    Requests of one conversation that ran at once have mixed their entries; tools' answers go with their calls.
    An answer whose call is not there any more is left out.
    """
    turns: list[list[Entry]] = []
    for entry in entries:
        if not entry.continues:
            turns.append([entry])
        elif (turn := _continued(turns, entry.items)) is not None:
            turns.remove(turn)
            turns.append([*turn, entry])
    return turns


def merge(entries: Iterable[Entry], asked: Sequence[Item], max_tokens: int | None = None) -> Merged:
    """What was said before, and then what is asked now.

    Whole turns go from the oldest until all have at most `max_tokens`; never the turn that the request goes on with.
    A turn that still waits for its tools is left out, unless this is their answer.
    """
    turns = turns_of(entries)
    continued = _continued(turns, asked) or []
    complete = [turn for turn in turns if turn is not continued and not _open_calls(turn)]
    room = None
    if max_tokens is not None:
        room = max_tokens - tokens_of(asked) - sum(entry.tokens for entry in continued)
    kept = _newest(complete, room)
    items = [item for turn in [*kept, continued] for entry in turn for item in entry.items]
    return Merged([*items, *asked], len(kept) + bool(continued), len(complete) - len(kept))


def continues_nothing(entries: Iterable[Entry], asked: Sequence[Item]) -> bool:
    """Whether tools answer a call that is not known (any more)."""
    return bool(asked) and _answered(asked[0]) is not None and _continued(turns_of(entries), asked) is None


def first_kept(sizes: Sequence[tuple[int, bool]], max_tokens: int) -> int:
    """Index of the oldest entry to keep, by each one's tokens and whether it continues another.

    It never continues one; the newest turn is kept whatever its size. (The script in `store` does the same.)
    """
    total, first = 0, None
    for index in range(len(sizes) - 1, -1, -1):
        tokens, continues = sizes[index]
        total += tokens
        if first is not None and total > max_tokens:
            break
        if not continues:
            first = index
    return first or 0


def tokens_of(items: Iterable[Item]) -> int:
    """Estimated tokens of messages or items."""
    return sum(map(_tokens, items))


def _tokens(item: Item) -> int:
    texts = [text_of(item.get("content")), *(value for value in (item.get("arguments"), item.get("output")) if value)]
    tokens = _TOKENS_PER_ITEM + sum(tokens_in(text_of(text)) for text in texts)
    if calls := item.get("tool_calls"):
        tokens += tokens_in(str(calls))
    return tokens


def _newest(turns: list[list[Entry]], room: int | None) -> list[list[Entry]]:
    if room is None:
        return turns
    kept = 0
    for turn in reversed(turns):
        room -= sum(entry.tokens for entry in turn)
        if room < 0:
            break
        kept += 1
    return turns[len(turns) - kept :]


def _continued(turns: Sequence[list[Entry]], items: Sequence[Item]) -> list[Entry] | None:
    """The newest turn with an open call that these items begin to answer."""
    answered = set()
    for item in items:
        if (call := _answered(item)) is None:
            break
        answered.add(call)
    return next((turn for turn in reversed(turns) if _open_calls(turn) & answered), None) if answered else None


def _open_calls(turn: Sequence[Entry]) -> set[str]:
    """Ids of the calls in a turn that no tool has answered."""
    waiting: set[str] = set()
    for entry in turn:
        for item in entry.items:
            waiting |= _called(item)
            waiting.discard(_answered(item) or "")
    return waiting


def _called(item: Item) -> set[str]:
    """Ids of the tool calls that an item makes."""
    if item.get("type") in ("function_call", "custom_tool_call"):
        return {str(item.get("call_id"))}
    calls = item.get("tool_calls")
    return {str(call.get("id")) for call in calls if isinstance(call, dict)} if isinstance(calls, list) else set()


def _answered(item: Item) -> str | None:
    """Id of the call that an item answers, if it is a tool's answer."""
    if item.get("type") in ("function_call_output", "custom_tool_call_output"):
        return str(item.get("call_id"))
    return str(item.get("tool_call_id")) if item.get("role") == "tool" else None
