"""What a client says about thinking, in every form that clients use, and which form wins. Pure."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from serve_app.errors import bad_request
from serve_app.model_schema import Thinking
from serve_app.routing.facts import Facts

# Qwen's soft switches count where they stand alone; the last one in the message wins, as in Qwen's own guide.
_SOFT_SWITCH = re.compile(r"(?:(?<=\s)|^)/(no_)?think(?=\s|$)")
# In a system prompt other words may speak of it; whoever means it puts it first or last.
_SYSTEM_SWITCH = re.compile(r"\A\s*/(no_)?think(?=\s|\Z)|(?<=\s)/(no_)?think\s*\Z")
# Older guides tell people to begin or end their message with a bare tag. A closed pair is quoted text.
_BARE_TAG = re.compile(r"\A\s*<think>|<think>\s*\Z")
_MODES = {"thinking": True, "non_thinking": False}


@dataclasses.dataclass(frozen=True, slots=True)
class Wish:
    """One thing the client said. `budget`: thinking tokens, None where it named no number."""

    thinking: bool
    source: str
    budget: int | None = None
    unlimited: bool = False


def wishes(facts: Facts, thinking: Thinking) -> list[Wish]:
    """Everything the client said about thinking, strongest first. Raises `ApiError` for a wrong value."""
    found = [
        _hard_switch(facts.chat),
        _budget(facts.chat),
        _declared(facts),
        _effort(facts.chat, thinking),
        _thinking_object(facts.chat) if facts.endpoint != "messages" else None,
        _reasoning_object(facts.chat, thinking),
        _soft_switch(facts.last_user_text),
        _system_switch(facts),
        _tag(facts.last_user_text),
        _mode(facts.chat),
    ]
    return [wish for wish in found if wish]


def _hard_switch(body: dict[str, Any]) -> Wish | None:
    value = body.get("chat_template_kwargs", {}).get("enable_thinking")
    if value is None:
        return None
    if not isinstance(value, bool):
        field = "chat_template_kwargs.enable_thinking"
        raise bad_request(f"`{field}` must be true or false.", field)
    return Wish(value, "enable_thinking")


def _budget(body: dict[str, Any]) -> Wish | None:
    value = body.get("thinking_token_budget")
    if value is None:
        return None
    if not _is_budget(value):
        raise bad_request("`thinking_token_budget` must be a whole number of at least 0.", "thinking_token_budget")
    return Wish(value > 0, "thinking_token_budget", budget=value)


def _declared(facts: Facts) -> Wish | None:
    """Anthropic's `thinking`, in its form already checked; `adaptive` leaves it to the router."""
    asked = facts.chat.get("thinking") if facts.endpoint == "messages" else None
    if not asked or asked["type"] == "adaptive":
        return None
    enabled = asked["type"] == "enabled"
    return Wish(enabled, "thinking", budget=asked["budget_tokens"] if enabled else None)


def _effort(body: dict[str, Any], thinking: Thinking) -> Wish | None:
    value = body.get("reasoning_effort")
    return None if value is None else _of_effort(value, thinking, "reasoning_effort", "reasoning_effort")


def _of_effort(value: Any, thinking: Thinking, source: str, field: str) -> Wish:
    if not isinstance(value, str) or value not in thinking.efforts:
        raise bad_request(f"`{field}` must be one of {', '.join(thinking.efforts)}.", field)
    budget = thinking.efforts[value]
    return Wish(budget != 0, source, budget=budget, unlimited=budget is None)


def _thinking_object(body: dict[str, Any]) -> Wish | None:
    """Anthropic's form, and GLM's, Kimi's and DeepSeek's: `{"type": "enabled", "budget_tokens": 1024}`."""
    value = body.get("thinking")
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("enabled", "disabled", "adaptive", "auto"):
        raise bad_request("`thinking` must be an object whose `type` is `enabled` or `disabled`.", "thinking")
    if kind == "disabled":
        return Wish(False, "thinking")
    budget = value.get("budget_tokens")
    if budget is not None and not _is_budget(budget):
        raise bad_request("`thinking.budget_tokens` must be a whole number of at least 0.", "thinking.budget_tokens")
    # Neither `adaptive` nor `auto` says that it should think.
    return Wish(budget != 0, "thinking", budget=budget) if kind == "enabled" else None


def _reasoning_object(body: dict[str, Any], thinking: Thinking) -> Wish | None:
    """OpenRouter's form: `{"effort": "high"}`, `{"enabled": true}` or `{"max_tokens": 1024}`."""
    value = body.get("reasoning")
    if value is None:
        return None
    if not isinstance(value, dict):
        raise bad_request("`reasoning` must be an object.", "reasoning")
    if value.get("enabled") is False:
        return Wish(False, "reasoning")
    if (effort := value.get("effort")) is not None:
        return _of_effort(effort, thinking, "reasoning", "reasoning.effort")
    if (budget := value.get("max_tokens")) is not None:
        if not _is_budget(budget):
            raise bad_request("`reasoning.max_tokens` must be a whole number of at least 0.", "reasoning.max_tokens")
        return Wish(budget > 0, "reasoning", budget=budget)
    return Wish(True, "reasoning") if value.get("enabled") is True else None


def _is_budget(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _soft_switch(text: str) -> Wish | None:
    switches = _SOFT_SWITCH.findall(text) if "think" in text else ()
    return Wish(switches[-1] != "no_", "soft_switch") if switches else None


def _system_switch(facts: Facts) -> Wish | None:
    text = facts.excerpt.system if facts.excerpt else ""
    switches = _SYSTEM_SWITCH.findall(text) if "think" in text else ()
    return Wish("no_" not in switches[-1], "soft_switch") if switches else None


def _tag(text: str) -> Wish | None:
    if "<think>" in text and _BARE_TAG.search(text) and "</think>" not in text:
        return Wish(True, "think_tag")
    return None


def _mode(body: dict[str, Any]) -> Wish | None:
    value = body.get("mode")
    if value is None:
        return None
    if not isinstance(value, str) or value not in _MODES:
        raise bad_request("`mode` must be `thinking` or `non_thinking`.", "mode")
    return Wish(_MODES[value], "mode")
