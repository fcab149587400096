"""What the encoder reads of a request: the ask, what came before it, the system prompt's beginning, the tools.

Everything is cut to a fixed share, so that the longest sequence is known and with it the time it takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from serve_app.routing.excerpt import Excerpt

Encode = Callable[[str], list[int]]

# Tokens kept of the head and the tail of each part.
_ASK = (48, 28)
_BEFORE = (8, 4)
_REPLY = (4, 8)
_SYSTEM = (12, 0)
_TOOLS = (8, 0)
LONGEST = 132
# Enough characters to fill the shares in any language; more would only cost tokenizing.
_CHARS = 400


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """The texts that make up a sequence; short enough to be sent to another process."""

    ask: str
    before: str = ""
    reply: str = ""
    system: str = ""
    tools: str = ""


def parts_of(excerpt: Excerpt) -> Parts:
    """The parts of a request."""
    return Parts(
        ask=_cut(excerpt.ask),
        before=_cut(excerpt.before),
        reply=_cut(excerpt.reply),
        system=_cut(excerpt.system),
        tools=_cut(", ".join(excerpt.tool_names)),
    )


def _cut(text: str) -> str:
    cut = text if len(text) <= 2 * _CHARS else f"{text[:_CHARS]} … {text[-_CHARS:]}"
    return cut.encode("utf-8", "replace").decode()  # half a surrogate pair cannot be sent


def sequence_of(parts: Parts, encode: Encode, *, start: int, end: int) -> list[int]:
    """Token ids, at most `LONGEST`."""
    ids = [start, *_part(encode, "query: ", parts.ask, _ASK), end]
    if parts.before or parts.reply:
        ids += (end, *_part(encode, "before: ", parts.before, _BEFORE))
        ids += (*_part(encode, "reply: ", parts.reply, _REPLY), end)
    if parts.system:
        ids += (end, *_part(encode, "system: ", parts.system, _SYSTEM), end)
    if parts.tools:
        ids += (end, *_part(encode, "tools: ", parts.tools, _TOOLS), end)
    return ids[:LONGEST]


def _part(encode: Encode, label: str, text: str, share: tuple[int, int]) -> list[int]:
    head, tail = share
    ids = encode(label + text)
    return ids if len(ids) <= head + tail else ids[:head] + ids[len(ids) - tail :]
