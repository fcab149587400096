"""What a conversation keeps: mode and model inside a tool loop, difficulty for "go ahead", the model otherwise. Pure.

A switch of model costs the prefix cache that the conversation has there (tokens to prefill again, less what is
evicted anyway while nobody writes) and the load of the other model where it is not awake. It is paid only for a
gain that is worth more.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

from serve_app.routing.excerpt import Excerpt, instruction_of, text_of
from serve_app.routing_schema import Sticky

_OPENING_CHARS = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Past:
    """What a conversation's last request was given.

    `turn` identifies the user turn it answered; `judged`: what rules or scorer thought of that turn's difficulty,
    None where the client itself had switched; `at_s`: when, on the caller's monotonic clock.
    """

    turn: str
    model_id: str
    thinking: bool
    budget: int | None
    judged: bool | None
    by_router: bool
    tokens: int
    at_s: float


def conversation_key(body: Mapping[str, Any], session: str | None, who: str) -> str:
    """The conversation a request belongs to: the id it names, else its opening messages. `who` keeps users apart."""
    named = session or named_by(body.get("conversation"))
    if named:
        return _digest("named", who, named)
    user = body.get("user")
    opening = [user if isinstance(user, str) else ""]
    for message in body["messages"]:
        opening += (message["role"], text_of(message.get("content"))[:_OPENING_CHARS])
        if message["role"] == "user":
            break
    return _digest("opening", who, *opening)


def named_by(conversation: object) -> str | None:
    """The id in a `conversation` field: a string, or an object with an `id`, as OpenAI has it."""
    if isinstance(conversation, dict):
        conversation = conversation.get("id")
    return conversation if isinstance(conversation, str) and conversation else None


def turn_id(excerpt: Excerpt) -> str:
    """Identifies the last user turn: a tool loop is all requests that end after the same one."""
    return _digest(str(excerpt.turns), excerpt.instruction)


def previous_turn_id(excerpt: Excerpt) -> str | None:
    """Identifies the user turn before it; None in a conversation's first turn."""
    return _digest(str(excerpt.turns - 1), instruction_of(excerpt.previous)) if excerpt.turns > 1 else None


def _digest(*parts: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        raw = part.encode("utf-8", "replace")
        digest.update(len(raw).to_bytes(8, "big"))
        digest.update(raw)
    return digest.hexdigest()


def switch_cost_s(past: Past, settings: Sticky, *, now_s: float, load_s: float) -> float:
    """Seconds that another model costs this conversation now: prefill again, and its load (0 if it is awake)."""
    idle_s = max(0.0, now_s - past.at_s)
    cached: float = past.tokens * 0.5 ** (idle_s / settings.cache_half_life_s)
    return cached / settings.prefill_tokens_per_s + load_s
