"""Batches on a directory: who owns them, which are not over, and the one process that works on each.

active/batch_…                   the id of its key: a batch that is not over
batches/key-…/batch_…/batch.json   how it stands; written by who has the claim, and once by who made it
                      input.jsonl  the input, which stays when the file is deleted
                      results.jsonl  see `ledger.py`
                      cancel       somebody asked for an end
                      lock         locked (flock) by the process that works on it; the kernel frees it with it
files/key-…/file-….json, .data   see `files.py`
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, BinaryIO, cast

from serve_app.batches.disk import Disk, private
from serve_app.batches.files import Files, Page, derived_id, in_order, new_id, owned, page_of
from serve_app.batches.ledger import Ledger
from serve_app.batches.plan import Bounds, Plan, read_plan
from serve_app.batches.state import BATCH, FINAL, Batch, ended, moved, seen
from serve_app.errors import ApiError

_BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")
# A batch that is being made has its marker first.
_UNMADE_S = 60.0


class Store:
    """Blocks; call it in a thread. `keep_s`: how long files and ended batches are kept."""

    def __init__(
        self, directory: Path, *, keep_s: float, disk: Disk | None = None, now: Callable[[], float] = time.time
    ) -> None:
        self._disk = disk or Disk()
        self._now = now
        self._keep_s = keep_s
        self._active = directory / "active"
        self._batches = directory / "batches"
        self.files = Files(directory, self._disk, now)
        self._disk.make(self._active)

    def create(
        self,
        key: str,
        *,
        input_file_id: str,
        endpoint: str,
        window: str,
        window_s: float,
        metadata: Mapping[str, str] | None,
    ) -> Batch:
        """Accept a batch; it runs when its turn comes. Raises `ApiError` (404) for a file that is not there."""
        source = self.files.path(key, input_file_id)
        now = self._now()
        batch = Batch(
            id=new_id("batch_", now),
            key=key,
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=window,
            created_at=int(now),
            expires_at=int(now + window_s),
            metadata=metadata,
        )
        folder = self._folder(key, batch.id)
        # The marker comes first: a batch that is listed and that nobody would ever run is worse than a marker alone.
        self._disk.put(self._active / batch.id, key.encode())
        self._disk.make(folder)
        self._disk.link(source, folder / "input.jsonl")
        self._disk.put(folder / "batch.json", BATCH.dump_json(batch))
        return batch

    def get(self, key: str, batch_id: str) -> Batch:
        """How a batch stands. Raises `ApiError` (404)."""
        found = self._read(key, batch_id) if _BATCH_ID.fullmatch(batch_id) else None
        if found is None:
            raise ApiError(404, "No such batch.", code="batch_not_found", param="batch_id")
        return found

    def page(self, key: str, *, after: str | None, limit: int) -> Page[Batch]:
        """A page of the key's batches, the newest first."""
        ids = (path.name for path in owned(self._batches, key).glob("batch_*"))
        found = (self._read(key, batch_id) for batch_id in in_order(ids, after, newest_first=True))
        return page_of((one for one in found if one), limit)

    def cancel(self, key: str, batch_id: str) -> Batch:
        """Ask for an end; whoever works on it hears of it. Raises `ApiError` (404, 409)."""
        batch = self.get(key, batch_id)
        if batch.status in ("validating", "in_progress"):
            self._disk.put(self._folder(key, batch_id) / "cancel", b"")
            batch = self.get(key, batch_id)
        if batch.status not in ("cancelling", "cancelled"):
            raise ApiError(409, f"A batch that is {batch.status} cannot be cancelled.", code="batch_not_cancellable")
        return batch

    def active(self) -> list[tuple[str, str]]:
        """Key and id of the batches that are not over, the oldest first."""
        found = []
        for batch_id in sorted(os.listdir(self._active)):
            if _BATCH_ID.fullmatch(batch_id):
                with contextlib.suppress(FileNotFoundError):
                    found.append(((self._active / batch_id).read_text(), batch_id))
        return found

    def claim(self, key: str, batch_id: str) -> Claim | None:
        """Take a batch to work on; None if another process or task has it, or if it is over."""
        folder = self._folder(key, batch_id)
        marker = self._active / batch_id
        batch = self._read(key, batch_id)
        if batch is None or batch.status in FINAL:
            with contextlib.suppress(FileNotFoundError):
                if batch or self._now() - marker.stat().st_mtime > _UNMADE_S:
                    self._disk.remove(marker)
            return None
        lock = _locked(folder / "lock")
        if lock is None:
            return None
        # It may have gone on until the lock was ours.
        batch = self._plain(folder)
        if batch is None or batch.status in FINAL:
            lock.close()
            return None
        return Claim(batch, folder, marker, lock, self.files, self._disk, self._keep_s)

    def lane(self) -> IO[bytes] | None:
        """The right to run lines, of one process at a time, until it is closed; None if another one has it.

        With two of them each would take the other's lines for interactive requests, and give way to them.
        """
        return _locked(self._active / "lane")

    def sweep(self) -> None:
        """Remove what was kept long enough."""
        self.files.sweep()
        for folder in self._batches.glob("key-*/batch_*"):
            batch = self._plain(folder)
            if batch is None:
                # It was being made when its Router was killed.
                over = self._now() - folder.stat().st_mtime > _UNMADE_S
            else:
                over = batch.status in FINAL and self._now() - max(batch.times.values()) > self._keep_s
            if over:
                self._disk.remove(folder)

    def _folder(self, key: str, batch_id: str) -> Path:
        return owned(self._batches, key) / batch_id

    def _read(self, key: str, batch_id: str) -> Batch | None:
        folder = self._folder(key, batch_id)
        batch = self._plain(folder)
        return seen(batch, cancelled_at(folder)) if batch else None

    def _plain(self, folder: Path) -> Batch | None:
        try:
            return BATCH.validate_json((folder / "batch.json").read_bytes())
        except FileNotFoundError:
            return None


class Claim:
    """A batch that is ours to work on, until `close`."""

    def __init__(
        self, batch: Batch, folder: Path, marker: Path, lock: IO[bytes], files: Files, disk: Disk, keep_s: float
    ) -> None:
        self.batch = batch
        self._folder = folder
        self._marker = marker
        self._lock = lock
        self._files = files
        self._disk = disk
        self._keep_s = keep_s
        self._input: BinaryIO | None = None
        self._ledger: Ledger | None = None

    @property
    def ledger(self) -> Ledger:
        """What was recorded, and where more is."""
        if self._ledger is None:
            self._ledger = Ledger(self._folder / "results.jsonl", self._disk)
        return self._ledger

    def close(self) -> None:
        """Let others have it."""
        if self._ledger:
            self._ledger.close()
        if self._input:
            self._input.close()
        self._lock.close()

    def plan(self, bounds: Bounds) -> Plan:
        """What its input holds."""
        if self._input is None:
            self._input = (self._folder / "input.jsonl").open("rb")
        self._input.seek(0)
        return read_plan(self._input, bounds)

    def raw(self, start: int, size: int) -> bytes:
        """So many bytes of the input that was planned; several threads may ask at once."""
        assert self._input, "what runs was planned"
        return os.pread(self._input.fileno(), size, start)

    def cancelled_at(self) -> float | None:
        """When somebody asked for an end."""
        return cancelled_at(self._folder)

    def save(self, batch: Batch) -> None:
        """Write how it stands, and take it out of the active ones if it is over."""
        self._disk.put(self._folder / "batch.json", BATCH.dump_json(batch))
        self.batch = batch
        if batch.status in FINAL:
            self._disk.remove(self._marker)

    def counted(self) -> Batch:
        """The batch with the counts of what is recorded."""
        ledger = self.ledger
        return dataclasses.replace(self.batch, completed=len(ledger.good), failed=len(ledger.bad))

    def finish(self, now: float) -> None:
        """Write the output files from the log, and the batch's last state. Killed anywhere, it can be done again."""
        batch = self.counted()
        written: dict[str, str | None] = {"output_file_id": None, "error_file_id": None}
        for field, good, there in (
            ("output_file_id", True, batch.completed),
            ("error_file_id", False, batch.failed),
        ):
            if there:
                name = "output" if good else "errors"
                source = cast(BinaryIO, _Joined(self.ledger.records(good=good)))
                written[field] = self._files.add(
                    batch.key,
                    source,
                    filename=f"{batch.id}_{name}.jsonl",
                    purpose="batch_output",
                    keep_s=self._keep_s,
                    file_id=derived_id(batch.id, name),
                ).id
        self.save(moved(batch, ended(batch), now, **written))


def _locked(path: Path) -> IO[bytes] | None:
    """An open file with the lock on it, which goes when it is closed or forgotten; None if another one has it."""
    file = open(path, "ab", opener=private)  # noqa: SIM115 # whoever gets it closes it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def cancelled_at(folder: Path) -> float | None:
    """When somebody asked for an end of the batch in this folder."""
    try:
        return (folder / "cancel").stat().st_mtime
    except FileNotFoundError:
        return None


class _Joined:
    """Pieces of bytes as a file to copy from."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces

    def read(self, size: int = -1) -> bytes:
        """The next piece, however large; nothing at the end."""
        return next(self._pieces, b"")
