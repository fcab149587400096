"""Media that a request names by URL: engines fetch them, so each must be data or on a listed host. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any
from urllib.parse import urlsplit

from serve_app.routing.facts import Facts
from serve_app.routing.pairs import messages_of

_FIELDS = ("image_url", "input_image", "image", "audio_url", "input_audio", "video_url", "file")


def foreign_media(facts: Facts, hosts: Collection[str]) -> str | None:
    """The field in which anything but `data:` and HTTP on these hosts is named.

    The engine holds to the same list; here it is for an answer in clear words, before anything is loaded.
    """
    for field, message in _messages(facts):
        if not all(_is_allowed(url, hosts) for url in _urls(message)):
            return field
    return None


def _messages(facts: Facts) -> Iterator[tuple[str, dict[str, Any]]]:
    """All that may have media as its parts, wherever it stands."""
    if facts.endpoint in ("score", "rerank"):
        yield from messages_of(facts.body)
        return
    # Those of /tokenize have been looked at by nobody.
    given = facts.chat.get("messages")
    for message in given if isinstance(given, list) else ():
        if isinstance(message, dict):
            yield "input" if facts.endpoint == "responses" else "messages", message


def _urls(message: dict[str, Any]) -> Iterator[str]:
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict):
            continue
        for field in _FIELDS:
            named = part.get(field)
            url = named.get("url") if isinstance(named, dict) else named
            if isinstance(url, str):
                yield url


def _is_allowed(url: str, hosts: Collection[str]) -> bool:
    if url[:5].lower() == "data:":
        return True
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and parts.hostname in hosts
    except ValueError:
        return False
