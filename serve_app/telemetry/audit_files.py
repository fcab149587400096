"""The files of the audit: each has one writer, which locks it; all writers together keep the directory within bounds.

A file is never renamed: a full one is closed, and the next one has a new name. Whoever begins a file removes the oldest
that nobody writes any more, also those of processes that have ended, until the rest is as small as configured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from serve_app.model_schema import resolve_dir
from serve_app.service_schema import AuditSettings

logger = logging.getLogger(__name__)

PATTERN = "audit-*.jsonl*"
# Whoever reads them has a use for so many; a Router that restarts again and again must not fill a directory.
_MOST_FILES = 1000
_MOST_BATCH_BYTES = 256 * 1024
# The front door and Serve's ingress are two in one process.
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True, slots=True)
class Closed:
    """A file that nobody writes any more. `at`: when it was written last."""

    at: float
    name: str
    size: int


def surplus(files: Iterable[Closed], most_bytes: int, most_files: int = _MOST_FILES) -> list[str]:
    """The names of the oldest files without which the rest is within both bounds. Pure."""
    left = sorted(files, key=lambda file: (file.at, file.name))
    size = sum(file.size for file in left)
    gone: list[str] = []
    for file in left:
        if size <= most_bytes and len(left) - len(gone) <= most_files:
            break
        size -= file.size
        gone.append(file.name)
    return gone


def tidy(directory: Path, most_bytes: int) -> None:
    """Remove what is too much. Several processes may do so at once: they choose the same files."""
    closed = [file for path in directory.glob(PATTERN) if (file := _closed(path))]
    for name in surplus(closed, most_bytes):
        (directory / name).unlink(missing_ok=True)


def _closed(path: Path) -> Closed | None:
    """None for a file that somebody writes, or that is gone by now."""
    # For writing: NFS locks no file that is only read.
    with contextlib.suppress(OSError), path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(file.fileno())
        return Closed(found.st_mtime, path.name, found.st_size)
    return None


class AuditFile(logging.Handler):
    """Writes each record whole or not at all: what fails is counted by `drop`, and leaves no half line.

    They are written at `batch_over`, or when there are many.
    """

    def __init__(self, settings: AuditSettings, drop: Callable[[], None]) -> None:
        super().__init__()
        directory = resolve_dir(settings.directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            # A service without its audit is better than none. Each record that is lost is counted.
            logger.error("the audit's directory %s cannot be made, its records are lost: %s", directory, error.strerror)
        self._directory = directory
        self._max_bytes = settings.max_bytes
        self._most_bytes = settings.keep * settings.max_bytes
        self._drop = drop
        self._file: int | None = None
        self._size = 0
        self._lines: list[bytes] = []
        self._waiting_bytes = 0
        self.path = self._new_path()

    def _new_path(self) -> Path:
        # Processes of other containers may have the same number, and so may the next one here.
        unique = f"{os.getpid()}-{next(_numbers)}-{time.time_ns() // 1000}"
        return self._directory / f"audit-{socket.gethostname()}-{unique}.jsonl"

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        try:
            line = (self.format(record) + "\n").encode()
        except Exception:
            self._drop()
            return
        self._lines.append(line)
        self._waiting_bytes += len(line)
        if self._waiting_bytes >= _MOST_BATCH_BYTES:
            self.batch_over()

    def batch_over(self) -> None:
        """Write what has come. Where the disk does not take all of it, as many records as it does."""
        lines, self._lines, self._waiting_bytes = self._lines, [], 0
        for together in self._by_file(lines):
            try:
                self._write(b"".join(together))
            except Exception:
                for line in together:
                    try:
                        self._write(line)
                    except Exception:
                        self._drop()
                        self._let_go()

    def close(self) -> None:
        """See `logging.Handler`."""
        with self.lock or contextlib.nullcontext():
            self.batch_over()
        self._let_go()
        super().close()

    def _by_file(self, lines: Iterable[bytes]) -> Iterator[list[bytes]]:
        """The lines that go together into one file, a new one where they would make the last too large."""
        together: list[bytes] = []
        size = self._size
        for line in lines:
            if size and size + len(line) > self._max_bytes:
                if together:
                    yield together
                together, size = [], 0
            together.append(line)
            size += len(line)
        if together:
            yield together

    def _write(self, lines: bytes) -> None:
        if self._size and self._size + len(lines) > self._max_bytes:
            self._let_go()
            self.path = self._new_path()
        # Somebody may have removed it: what is written then is seen by nobody.
        if self._file is None or not os.fstat(self._file).st_nlink:
            self._let_go()
            self._file = self._opened()
        try:
            rest = memoryview(lines)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            # A full disk takes the first bytes, and the next record would stand behind them, on the same line.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(lines)

    def _opened(self) -> int:
        is_new = not self.path.exists()
        opened = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        with contextlib.suppress(OSError):  # a file system without locks
            # Whoever tidies up has it for a moment.
            fcntl.flock(opened, fcntl.LOCK_SH)
        self._size = os.fstat(opened).st_size
        if is_new:
            tidy(self._directory, self._most_bytes)
        return opened

    def _let_go(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                os.close(file)
