"""The record of shadow mode: what was applied and what would have been decided, one JSON line a request, no text.

`python -m serve_app shadow FILE...` compares them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from serve_app.model_schema import resolve_dir
from serve_app.routing.decision import Decision
from serve_app.routing.facts import Facts

logger = logging.getLogger(__name__)

_FLUSH_EVERY_S = 1.0


class ShadowRecord:
    """Appends lines to a file, off the event loop, once a second."""

    def __init__(self, file: str) -> None:
        self._path = resolve_dir(file)
        self._lines: list[bytes] = []
        self._flushing: asyncio.Task[None] | None = None

    def record(self, applied: Decision, decided: Decision, facts: Facts) -> None:
        """Note one request."""
        excerpt = facts.excerpt
        line = {
            "at": round(time.time(), 3),
            "applied": _choice(applied),
            "decided": _choice(decided),
            "language": excerpt.language if excerpt else None,
            "prompt_tokens": excerpt.prompt_tokens if excerpt else None,
        }
        self._lines.append(orjson.dumps(line) + b"\n")
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(self._flush_later())

    async def _flush_later(self) -> None:
        while self._lines:
            await asyncio.sleep(_FLUSH_EVERY_S)
            await self.flush()

    async def flush(self) -> None:
        """Write what is noted."""
        lines, self._lines = self._lines, []
        if not lines:
            return
        try:
            await asyncio.to_thread(self._append, b"".join(lines))
        except OSError as error:
            logger.warning("the shadow record cannot be written: %s", error)

    def _append(self, data: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(data)


def _choice(decision: Decision) -> dict[str, Any]:
    return {
        "model": decision.better or decision.model_id,
        "model_source": decision.model_source,
        "thinking": decision.thinking,
        "thinking_source": decision.thinking_source,
        "rule": decision.rule,
        "score": round(decision.score.think, 4) if decision.score else None,
    }


@dataclasses.dataclass
class Comparison:
    """What a record says: requests, how many would change, and by what."""

    requests: int = 0
    other_model: int = 0
    more_thinking: int = 0
    less_thinking: int = 0
    sources: Counter[str] = dataclasses.field(default_factory=Counter)
    models: Counter[str] = dataclasses.field(default_factory=Counter)
    by_language: dict[str, Counter[str]] = dataclasses.field(default_factory=dict)


class _Choice(BaseModel):
    """What a line says of one of the two decisions."""

    model_config = ConfigDict(strict=True)

    model: str
    thinking: bool
    thinking_source: str
    rule: str | None


class _Line(BaseModel):
    """One line of a record; what it holds besides is not looked at."""

    model_config = ConfigDict(strict=True)

    applied: _Choice
    decided: _Choice
    language: str | None = None


def compare(files: Iterable[Path]) -> Comparison:
    """Read records. Raises `ValueError` that names the line which is none."""
    found = Comparison()
    for file in files:
        for number, raw in enumerate(file.read_bytes().splitlines(), 1):
            try:
                line = _Line.model_validate_json(raw)
            except ValidationError:
                raise ValueError(f"{file}:{number}: not a line of a shadow record") from None
            applied, decided = line.applied, line.decided
            found.requests += 1
            found.other_model += decided.model != applied.model
            found.more_thinking += decided.thinking > applied.thinking
            found.less_thinking += decided.thinking < applied.thinking
            source = decided.thinking_source
            found.sources[f"rule: {decided.rule}" if source == "rule" else source] += 1
            found.models[decided.model] += 1
            counts = found.by_language.setdefault(line.language or "other", Counter())
            counts["requests"] += 1
            counts["thinking"] += decided.thinking
    return found
