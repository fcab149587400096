"""What is done to the disk: each step is whole or not at all, and on the disk when it returns."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


class Disk:
    """The only hand that writes below the directory of batches; tests kill it between any two steps."""

    def put(self, path: Path, data: bytes) -> None:
        """Write a file, or replace it."""
        with self._replacing(path) as file:
            file.write(data)

    def copy(self, path: Path, source: BinaryIO) -> int:
        """Write a file from a stream; returns its size in bytes."""
        with self._replacing(path) as file:
            shutil.copyfileobj(source, file, 1 << 20)
            return file.tell()

    def link(self, source: Path, path: Path) -> None:
        """The same content under a second name, which stays when the first one goes."""
        try:
            os.link(source, path)
        except FileExistsError:
            return
        except OSError:
            with source.open("rb") as file:  # a file system without links
                self.copy(path, file)
            return
        _sync_directory(path.parent)

    def append(self, descriptor: int, data: bytes) -> None:
        """Add whole lines to an open log."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)

    def cut(self, descriptor: int, size: int) -> None:
        """Drop what stands behind these bytes of an open log."""
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)

    def remove(self, path: Path) -> None:
        """Remove a file or a directory with all in it; no harm if it is gone."""
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            _sync_directory(path.parent)

    def make(self, path: Path) -> None:
        """A directory with those above it; only this user may look into it."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sync_directory(path.parent)

    @contextlib.contextmanager
    def _replacing(self, path: Path) -> Iterator[BinaryIO]:
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            with open(temporary, "xb", opener=private) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            self.rename(temporary, path)
        except Exception:
            temporary.unlink(missing_ok=True)
            raise
        _sync_directory(path.parent)

    def rename(self, temporary: Path, path: Path) -> None:
        """The step that makes a written file seen."""
        temporary.replace(path)


def private(path: str, flags: int) -> int:
    """An opener of files that only this user may read."""
    return os.open(path, flags, 0o600)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
