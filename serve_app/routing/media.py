"""Media that a chat names by URL: engines fetch them, so each must be data or on a listed host. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any
from urllib.parse import urlsplit

_FIELDS = ("image_url", "input_image", "image", "audio_url", "input_audio", "video_url", "file")


def names_foreign_media(messages: list[dict[str, Any]], hosts: Collection[str]) -> bool:
    """Whether a message names anything but `data:` and HTTP on these hosts.

    The engine holds to the same list; here it is for an answer in clear words, before anything is loaded.
    """
    return any(not _is_allowed(url, hosts) for url in _urls(messages))


def _urls(messages: list[dict[str, Any]]) -> Iterator[str]:
    for message in messages:
        content = message.get("content")
        if not isinstance(content, list):
            continue
        for part in content:
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
