"""One record for each request, refused ones too: who asked, what was decided, what it cost. No prompts, no keys.

Requests only put their record into a bounded queue; a thread of its own writes, a fiftieth of a second's records at a
time: to wake a thread costs a request more than its record does. What does not fit, or cannot be written (a full disk),
is dropped and counted: an audit must never hold up or fail an answer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import math
import queue
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import orjson

from serve_app.service_schema import AuditSettings
from serve_app.telemetry.audit_files import PATTERN, AuditFile

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0
_PAUSE_S = 0.02


class Audit:
    """Writes records to the configured sink, from `start` to `close`. `dropped` counts those that were not written.

    `lost` is called for each of these, from any thread.
    """

    def __init__(
        self, settings: AuditSettings, otlp_endpoint: str = "", lost: Callable[[], None] = lambda: None
    ) -> None:
        self.dropped = 0
        self._lost = lost
        self._settings = settings
        self._otlp_endpoint = otlp_endpoint
        self._records = _Records(settings.queue)
        self._listener: _Writer | None = None

    def start(self) -> Audit:
        """Begin to write."""
        if self._settings.sink != "none":
            handler = _handler(self._settings, self._otlp_endpoint, self._drop)
            self._listener = _Writer(self._records, handler, self._drop)
            self._listener.start()
        return self

    def write(self, fields: Mapping[str, Any]) -> None:
        """Take one record; never waits."""
        if self._listener is None:
            return
        try:
            self._records.put_nowait(fields)
        except queue.Full:
            self._drop()

    def close(self) -> None:
        """Write what is queued; what a disk that hangs does not take within seconds is dropped and counted."""
        if self._listener:
            listener, self._listener = self._listener, None
            if listener.ended():
                for handler in listener.handlers:
                    with contextlib.suppress(OSError):  # of records that were counted already
                        handler.close()
            else:
                for _ in range(len(self._records)):
                    self._drop()

    def _drop(self) -> None:
        self.dropped += 1
        self._lost()
        if self.dropped & (self.dropped - 1) == 0:
            logger.error("audit records could not be written: %d so far", self.dropped)


class _Records:
    """A bounded queue whose only reader sleeps a moment before it takes what has come."""

    def __init__(self, most: int) -> None:
        self._waiting: deque[Any] = deque()
        self._most = most
        self._some = threading.Event()
        self._ended = threading.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def put_nowait(self, record: Any) -> None:
        """See `queue.Queue`. Raises `queue.Full`."""
        if len(self._waiting) >= self._most:
            raise queue.Full
        self._waiting.append(record)
        if not self._some.is_set():
            self._some.set()

    def end(self, last: Any) -> None:
        """Put this last one, full or not, and have the reader make haste."""
        self._ended.set()
        self._waiting.append(last)
        self._some.set()

    def get(self, batch_over: Callable[[], None]) -> Any:
        """The next one; `batch_over` is called before each sleep."""
        while not self._waiting:
            batch_over()
            self._some.wait()
            self._ended.wait(_PAUSE_S)
            self._some.clear()
        return self._waiting.popleft()


class _Writer(logging.handlers.QueueListener):
    """Python's own, for batches and for handlers that fail: neither ends its thread, or the shutdown."""

    def __init__(self, records: _Records, handler: logging.Handler, drop: Callable[[], None]) -> None:
        # It only asks it for records, by `dequeue`, and tells it nothing.
        super().__init__(cast(Any, records), handler)
        self._records = records
        self._drop = drop
        self._batch_over = handler.batch_over if isinstance(handler, AuditFile) else lambda: None

    def dequeue(self, block: bool) -> Any:
        """See `logging.handlers.QueueListener`."""
        return self._records.get(self._batch_over)

    def prepare(self, record: Any) -> logging.LogRecord:
        """Made here, and not where a request waits for it."""
        return logging.LogRecord("switchyard.audit", logging.INFO, "", 0, record, None, None)

    def handle(self, record: Any) -> None:
        try:
            super().handle(record)
        except Exception:
            self._drop()

    def ended(self) -> bool:
        """Have everything written; False where that takes too long."""
        thread = self._thread
        assert thread
        self._records.end(None)
        thread.join(_CLOSE_S)
        return not thread.is_alive()


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return orjson.dumps(record.msg).decode()


class _Stdout(logging.StreamHandler[Any]):
    """The process's standard output; what fails is counted."""

    def __init__(self, drop: Callable[[], None]) -> None:
        super().__init__(sys.stdout)
        self._drop = drop

    def handleError(self, record: logging.LogRecord) -> None:  # logging's name
        self._drop()


def _handler(settings: AuditSettings, otlp_endpoint: str, drop: Callable[[], None]) -> logging.Handler:
    handler: logging.Handler
    match settings.sink:
        case "file":
            handler = AuditFile(settings, drop)
        case "stdout":
            handler = _Stdout(drop)
        case _:
            from serve_app.telemetry.otlp_logs import otlp_handler

            handler = otlp_handler(otlp_endpoint)
    handler.setFormatter(_Json())
    return handler


def read_records(directory: Path, since: float = 0.0) -> Iterator[dict[str, Any]]:
    """The records of all files of a directory that are not older than `since` (Unix time). Faulty lines are skipped."""
    for path in sorted(directory.glob(PATTERN)):
        # The service may remove old ones meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < since:
                continue
            with path.open("rb") as file:
                yield from _records(file, since)


def _records(lines: Iterable[bytes], since: float) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue  # a line that was cut by a crash
        at = record.get("at", 0) if isinstance(record, dict) else None
        if isinstance(at, int | float) and at >= since:
            yield record


def usage(records: Iterable[Mapping[str, Any]], by: Iterable[str]) -> list[dict[str, Any]]:
    """Sums by the given fields, the largest consumer first. Pure.

    `engine_s` is the time that requests ran on engines: with `n` of them at once on a GPU, its seconds count `n` times.
    """
    names = tuple(by)
    groups: defaultdict[tuple[str, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        groups[tuple(str(record.get(name, "")) for name in names)].append(record)
    rows = []
    for values, found in groups.items():
        sums: Counter[str] = Counter()
        for record in found:
            for name in ("prompt_tokens", "completion_tokens", "reasoning_tokens", "cached_tokens"):
                sums[name] += record.get(name) or 0
            sums["engine_ms"] += record.get("engine_ms") or 0
        first = sorted(record["ttft_ms"] for record in found if record.get("ttft_ms") is not None)
        rows.append(
            {
                **dict(zip(names, values, strict=True)),
                "requests": len(found),
                "refused": sum((record.get("status") or 0) >= 400 for record in found),
                **{name: sums[name] for name in ("prompt_tokens", "completion_tokens", "reasoning_tokens")},
                "cached_tokens": sums["cached_tokens"],
                "ttft_p50_ms": _percentile(first, 0.5),
                "ttft_p99_ms": _percentile(first, 0.99),
                "engine_s": round(sums["engine_ms"] / 1000, 1),
            }
        )
    return sorted(rows, key=lambda row: -(row["prompt_tokens"] + row["completion_tokens"]))


def _percentile(ordered: list[float], share: float) -> float | None:
    """The smallest value that so large a share of all do not exceed."""
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else None


def since_of(text: str, now: float | None = None) -> float:
    """Unix time of `30m`, `12h`, `7d` ago, or of an ISO date. Raises `ValueError`."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    if text and text[-1] in units and text[:-1].isdigit():
        return (time.time() if now is None else now) - int(text[:-1]) * units[text[-1]]
    from datetime import datetime

    return datetime.fromisoformat(text).astimezone().timestamp()


def as_json(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows for another program."""
    return json.dumps(list(rows), indent=2)
