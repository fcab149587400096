"""The files of `/v1/files` on a directory. Each key sees its own only."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from pydantic import TypeAdapter

from serve_app.batches.disk import Disk
from serve_app.errors import ApiError

Item = TypeVar("Item")
_FILE_ID = re.compile(r"file-[0-9a-f]{32}")
_ORPHAN_S = 86_400


@dataclasses.dataclass(frozen=True, slots=True)
class StoredFile:
    """What is known of a file besides its content. Times in Unix seconds."""

    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int

    def card(self) -> dict[str, Any]:
        """OpenAI's object for it."""
        return {"object": "file", "status": "processed", **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """One page of a list."""

    items: tuple[Item, ...]
    more: bool


_STORED = TypeAdapter(StoredFile)


class Files:
    """Blocks; call it in a thread. What is written here is seen by every Router that has the directory."""

    def __init__(self, directory: Path, disk: Disk, now: Callable[[], float] = time.time) -> None:
        self._directory = directory / "files"
        self._disk = disk
        self._now = now

    def add(
        self, key: str, source: BinaryIO, *, filename: str, purpose: str, keep_s: float, file_id: str | None = None
    ) -> StoredFile:
        """Keep a file. With an id that was given before its content is replaced."""
        file_id = file_id or new_id("file-", self._now())
        folder = owned(self._directory, key)
        self._disk.make(folder)
        size = self._disk.copy(folder / f"{file_id}.data", source)
        now = int(self._now())
        stored = StoredFile(file_id, filename, purpose, size, now, now + int(keep_s))
        # What has no such record does not exist: it comes last, and goes first.
        self._disk.put(folder / f"{file_id}.json", _STORED.dump_json(stored))
        return stored

    def get(self, key: str, file_id: str) -> StoredFile:
        """One file. Raises `ApiError` (404)."""
        found = self._read(key, file_id) if _FILE_ID.fullmatch(file_id) else None
        if found is None or found.expires_at <= self._now():
            raise ApiError(404, "No such file.", code="file_not_found", param="file_id")
        return found

    def path(self, key: str, file_id: str) -> Path:
        """Where its content is. Raises `ApiError` (404)."""
        self.get(key, file_id)
        return owned(self._directory, key) / f"{file_id}.data"

    def delete(self, key: str, file_id: str) -> None:
        """Forget a file; batches keep what they have of it. Raises `ApiError` (404)."""
        self.get(key, file_id)
        self._drop(owned(self._directory, key), file_id)

    def page(
        self, key: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> Page[StoredFile]:
        """A page of the key's files, in order of their creation."""
        ids = (path.stem for path in owned(self._directory, key).glob("file-*.json"))
        found = (self._read(key, file_id) for file_id in in_order(ids, after, newest_first=newest_first))
        now = self._now()
        return page_of((one for one in found if one and one.expires_at > now and purpose in (None, one.purpose)), limit)

    def sweep(self) -> None:
        """Remove what has expired, and what a crash left."""
        now = self._now()
        for folder in self._directory.glob("key-*"):
            for path in folder.glob("file-*.json"):
                found = self._read(folder.name.removeprefix("key-"), path.stem)
                if found and found.expires_at <= now:
                    self._drop(folder, path.stem)
            for path in folder.iterdir():
                if path.suffix != ".json" and not path.with_suffix(".json").exists() and _age_s(path, now) > _ORPHAN_S:
                    self._disk.remove(path)

    def _drop(self, folder: Path, file_id: str) -> None:
        self._disk.remove(folder / f"{file_id}.json")
        self._disk.remove(folder / f"{file_id}.data")

    def _read(self, key: str, file_id: str) -> StoredFile | None:
        try:
            return _STORED.validate_json((owned(self._directory, key) / f"{file_id}.json").read_bytes())
        except FileNotFoundError:
            return None


def owned(directory: Path, key: str) -> Path:
    """The part of a directory that is a key's. The prefix makes `..` a name like any other."""
    return directory / f"key-{key}"


def new_id(prefix: str, now: float) -> str:
    """An id that nobody guesses, and that sorts by the time it was made."""
    return f"{prefix}{int(now * 1e6):016x}{os.urandom(8).hex()}"


def derived_id(batch_id: str, what: str) -> str:
    """The id of a file that a batch writes: the same one again, if it writes it again after a crash."""
    digits = batch_id.removeprefix("batch_")
    return f"file-{digits[:16]}{hashlib.sha256(f'{digits}/{what}'.encode()).hexdigest()[:16]}"


def in_order(ids: Iterable[str], after: str | None, *, newest_first: bool) -> Iterator[str]:
    """Ids by the time they were made, from behind `after` on."""
    for one in sorted(ids, reverse=newest_first):
        if after is None or (one < after if newest_first else one > after):
            yield one


def page_of(found: Iterable[Item], limit: int) -> Page[Item]:
    """The first `limit` of them, and whether there are more."""
    items: list[Item] = []
    for one in found:
        if len(items) == limit:
            return Page(tuple(items), more=True)
        items.append(one)
    return Page(tuple(items), more=False)


def _age_s(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
