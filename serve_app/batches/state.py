"""PURE. A batch and the states it goes through, as OpenAI names them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import TypeAdapter

from serve_app.batches.plan import Problem

Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled", "expired"]
FINAL: frozenset[Status] = frozenset({"completed", "failed", "cancelled", "expired"})
_NEXT: Mapping[Status, frozenset[Status]] = {
    "validating": frozenset({"in_progress", "failed", "cancelling"}),
    "in_progress": frozenset({"finalizing", "cancelling"}),
    "finalizing": frozenset({"completed", "expired"}),
    "cancelling": frozenset({"cancelled"}),
    **{status: frozenset() for status in FINAL},
}
_WINDOW = re.compile(r"([1-9][0-9]{0,2})([hd])")
_MAX_WINDOW_S = 30 * 86_400


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One batch. `key` is the id of the key that owns it; `times` says when it came to each state (Unix seconds)."""

    id: str
    key: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    times: Mapping[str, int] = dataclasses.field(default_factory=dict)
    total: int = 0
    completed: int = 0
    failed: int = 0
    problems: tuple[Problem, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    metadata: Mapping[str, str] | None = None
    late: bool = False

    def card(self) -> dict[str, Any]:
        """OpenAI's object for it."""
        errors = [dataclasses.asdict(problem) for problem in self.problems]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{status}_at": self.times.get(status) for status in _NEXT if status != "validating"},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


BATCH = TypeAdapter(Batch)


def moved(batch: Batch, status: Status, now: float, **changes: Any) -> Batch:
    """The batch in its next state. Raises `ValueError` where that does not follow."""
    if status not in _NEXT[batch.status]:
        raise ValueError(f"{batch.id}: {status} does not follow {batch.status}")
    return dataclasses.replace(batch, status=status, times={**batch.times, status: int(now)}, **changes)


def seen(batch: Batch, cancelled_at: float | None) -> Batch:
    """How it stands for its owner, who asked at this time to have it cancelled; that comes too late for some."""
    if cancelled_at is None or "cancelling" not in _NEXT[batch.status]:
        return batch
    return moved(batch, "cancelling", cancelled_at)


def ended(batch: Batch) -> Status:
    """What a batch becomes of which every line that will run has run."""
    if batch.status == "cancelling":
        return "cancelled"
    return "expired" if batch.late else "completed"


def window_s(text: str) -> int | None:
    """The seconds of a completion window such as `24h` or `7d`; None where it is none."""
    found = _WINDOW.fullmatch(text)
    if found is None:
        return None
    seconds = int(found[1]) * (3600 if found[2] == "h" else 86_400)
    return seconds if seconds <= _MAX_WINDOW_S else None
