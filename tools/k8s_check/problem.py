"""What a check finds, and how manifests are walked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

Document = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Problem:
    """`where` is an object and the path in it, `what` says what is wrong and what would be right."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def name_of(document: Document) -> str:
    """`Kind/name`."""
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    return f"{document.get('kind')}/{name}"


def at(document: Document, *path: str | int) -> str:
    """An object and a path in it, as problems name them."""
    return f"{name_of(document)}: {joined(path)}"


def joined(path: tuple[str | int, ...]) -> str:
    """`a.b[0].c`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def dig(value: Any, *path: str | int, default: Any = None) -> Any:
    """What is at this path, or `default` where something on the way is missing or of another form."""
    for part in path:
        if isinstance(part, int):
            if not isinstance(value, list) or part >= len(value):
                return default
            value = value[part]
        elif isinstance(value, Mapping) and part in value:
            value = value[part]
        else:
            return default
    return value


def mapping(value: Any) -> Mapping[str, Any]:
    """The mapping itself, or an empty one for anything else."""
    return value if isinstance(value, Mapping) else {}


def items(value: Any) -> list[Mapping[str, Any]]:
    """The mappings of a list; nothing for anything else."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def walk(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Every value with its path, depth first."""
    yield path, value
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from walk(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from walk(inner, (*path, index))
