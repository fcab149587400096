"""The results of one batch: a log to which each finished line is added once, whatever is killed when."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from serve_app.batches.disk import Disk

_START = b'{"id":"batch_req_'


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """How one line ended. `status`: None where it was never sent, and `error` says why."""

    custom_id: str
    request_id: str
    status: int | None
    body: bytes = b""
    error: tuple[str, str] | None = None

    @property
    def good(self) -> bool:
        """Whether the line was answered as it wished."""
        return self.status == 200

    def record(self) -> bytes:
        """As a line of OpenAI's output file."""
        response: dict[str, Any] | None = None
        if self.status is not None:
            response = {"status_code": self.status, "request_id": self.request_id, "body": _on_one_line(self.body)}
        error = {"code": self.error[0], "message": self.error[1]} if self.error else None
        fields = {
            "id": f"batch_req_{self.request_id}",
            "custom_id": self.custom_id,
            "response": response,
            "error": error,
        }
        return orjson.dumps(fields) + b"\n"


class Ledger:
    """An open log of results. One owner at a time writes it; see `store.Claim`.

    A line that a crash cut is dropped when the log is opened: it was never reported to anybody. Opening raises
    `ValueError` for a file that holds something else.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        self._disk = disk
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._path = path
        self.good: set[str] = set()
        self.bad: set[str] = set()
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def __contains__(self, custom_id: str) -> bool:
        return custom_id in self.good or custom_id in self.bad

    def _read(self) -> None:
        whole = 0
        with self._path.open("rb") as file:
            for raw in file:
                if not raw.endswith(b"\n"):
                    if not raw.startswith(_START[: len(raw)]):
                        raise ValueError("no log of results")
                    break
                whole += len(raw)
                custom_id, good = _outcome(raw)
                (self.good if good else self.bad).add(custom_id)
        if whole < os.fstat(self._descriptor).st_size:
            self._disk.cut(self._descriptor, whole)

    def add(self, results: Iterable[Result]) -> None:
        """Record lines that are not recorded yet; they are on the disk when this returns."""
        fresh: dict[str, Result] = {}
        for result in results:
            if result.custom_id not in self:
                fresh.setdefault(result.custom_id, result)
        if not fresh:
            return
        self._disk.append(self._descriptor, b"".join(result.record() for result in fresh.values()))
        for result in fresh.values():
            (self.good if result.good else self.bad).add(result.custom_id)

    def records(self, *, good: bool) -> Iterator[bytes]:
        """The recorded lines that went well, or the others."""
        with self._path.open("rb") as file:
            yield from (raw for raw in file if _outcome(raw)[1] is good)

    def close(self) -> None:
        """Nothing is added any more."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


def _on_one_line(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace")


def _outcome(raw: bytes) -> tuple[str, bool]:
    fields = orjson.loads(raw)
    try:
        response = fields["response"]
        return fields["custom_id"], response is not None and response["status_code"] == 200
    except (KeyError, TypeError):
        raise ValueError("no result of a line") from None
