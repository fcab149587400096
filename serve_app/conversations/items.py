"""The items that a response was made from, as the Responses API lists them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve_app.conversations.history import Entry, Item

# What OpenAI calls the ids of each kind; the rest are `item`.
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}


def input_items(entries: Sequence[Entry], answered: int) -> list[Item]:
    """In order, with ids: all that went before, and what was asked. `answered`: items of the last entry's answer."""
    listed = []
    for number, entry in enumerate(entries, start=1):
        last = len(entry.items) - answered if number == len(entries) else None
        listed += [_listed(item, f"{entry.id}{index}") for index, item in enumerate(entry.items[:last])]
    return listed


def page(items: Sequence[Item], after: str | None, limit: int) -> tuple[Sequence[Item], bool]:
    """So many of the items after this one, and whether there are more. Raises `LookupError` where it is not there."""
    start = 0
    if after is not None:
        start = next(index for index, item in enumerate([*items, {"id": after}]) if item["id"] == after) + 1
        if start > len(items):
            raise LookupError(after)
    return items[start : start + limit], start + limit < len(items)


def _listed(item: Item, own_id: str) -> Item:
    """With the fields that clients of the API expect; what it says itself stays."""
    kind = item.get("type", "message")
    own = {"id": f"{_PREFIXES.get(kind, 'item')}_{own_id}", "type": kind, "status": "completed"}
    said = {key: value for key, value in item.items() if value is not None}
    return {**own, **said} | ({"content": _parts(item)} if kind == "message" else {})


def _parts(message: Item) -> Any:
    content = message.get("content")
    if not isinstance(content, str):
        return content
    if message.get("role") == "assistant":
        return [{"type": "output_text", "text": content, "annotations": []}]
    return [{"type": "input_text", "text": content}]
