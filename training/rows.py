"""Labelled requests: seeds for training, sets for evaluation. One JSON object a line, see seeds/README.md."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from serve_app.routing.excerpt import Excerpt, read_excerpt

ROOT = Path(__file__).resolve().parent.parent
SEEDS = ROOT / "training" / "seeds"
DATA = ROOT / "tests" / "data" / "routing"

_THINK = {"yes": 1.0, "no": 0.0, "either": 0.5}
_LARGE = {"large": 1.0, "small": 0.0, "either": 0.5}


@dataclasses.dataclass(frozen=True)
class Row:
    """A request and what was judged right: 1 for thinking, or the large model; 0 for not; 0.5 for either."""

    id: str
    lang: str
    kind: str
    topic: str
    messages: list[dict[str, Any]]
    tools: list[Any]
    think: float
    large: float

    @property
    def excerpt(self) -> Excerpt:
        """What routing sees of it."""
        return read_excerpt(self.messages, self.tools)


def read_rows(path: Path) -> list[Row]:
    """All rows of a file."""
    return list(_rows(path))


def read_seeds() -> list[Row]:
    """All training rows."""
    return [row for path in sorted(SEEDS.glob("*.jsonl")) for row in _rows(path)]


def _rows(path: Path) -> Iterable[Row]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        fields = json.loads(line)
        yield Row(
            id=fields.get("id", f"{path.stem}:{number}"),
            lang=fields["lang"],
            kind=fields["kind"],
            topic=fields.get("topic", ""),
            messages=fields["messages"],
            tools=fields.get("tools") or [],
            think=_THINK[fields["think"]],
            large=_LARGE[fields["size"]],
        )


def fold_of(row: Row, folds: int) -> int:
    """The fold of a row's topic: all rows of a topic are in one, whatever their order."""
    return int.from_bytes(hashlib.sha256(row.topic.encode()).digest()[:4]) % folds
