"""One request as an engine gets it."""

from __future__ import annotations

import dataclasses
from collections.abc import MutableMapping
from typing import Protocol

from serve_app.router.tally import Tally


class Shape(Protocol):
    """What is done to one answer on its way: nothing, as a rule."""

    def whole(self, body: bytes) -> bytes:
        """An answer that is not streamed."""

    def events(self, data: bytes) -> bytes:
        """Whole events of a stream."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineCall:
    """One request as an engine gets it, and what is done to its answer. Times in seconds; None: no limit.

    `began`: when the client's request came (`time.monotonic`), from which `ttft_s` and `total_s` count.
    """

    path: str
    body: bytes
    headers: MutableMapping[str, str]
    shape: Shape
    tally: Tally
    began: float
    ttft_s: float | None = None
    idle_s: float | None = None
    total_s: float | None = None
    comment_s: float = 15.0
