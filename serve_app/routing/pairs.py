"""What `/v1/score` and `/v1/rerank` compare, in each of the forms that vLLM takes. Pure, and no judge of odd ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from serve_app.routing.excerpt import text_of

_FIRST = ("text_1", "data_1", "queries", "query")
_SECOND = ("text_2", "data_2", "documents", "items")


def pairs_of(body: dict[str, Any]) -> list[tuple[str, str]]:
    """The pairs of texts: each of the first with each of the second in turn, or the only one with all."""
    firsts, seconds = ([_text(one) for _, one in _inputs(body, fields)] for fields in (_FIRST, _SECOND))
    if len(firsts) == 1:
        firsts *= len(seconds)
    return list(zip(firsts, seconds, strict=False))


def messages_of(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is no plain text, and has parts as a message has; with the name of the field that it stands in."""
    for field, given in _inputs(body, _FIRST + _SECOND):
        if isinstance(given, dict):
            yield field, given


def _inputs(body: dict[str, Any], fields: tuple[str, ...]) -> Iterator[tuple[str, object]]:
    for field in fields:
        given = body.get(field)
        if given is not None:
            yield from ((field, one) for one in (given if isinstance(given, list) else [given]))


def _text(given: object) -> str:
    return given if isinstance(given, str) else text_of(given.get("content")) if isinstance(given, dict) else ""
