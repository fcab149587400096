"""A disk that can be filled: a small tmpfs where this user may mount one, else a bound on the sizes of files."""

from __future__ import annotations

import contextlib
import errno
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

_SIZE_MIB = 16


class SmallDisk:
    """`directory` is on it."""

    def __init__(self, directory: Path, *, mounted: bool) -> None:
        self.directory = directory
        self.how = f"a tmpfs of {_SIZE_MIB} MiB" if mounted else "RLIMIT_FSIZE"
        self._mounted = mounted
        self._ballast = directory / "ballast"

    def fill(self, writers: list[psutil.Process]) -> None:
        """Leave no byte for these processes."""
        if not self._mounted:
            # A write that begins below the bound is cut there, as a disk does it.
            largest = max((path.stat().st_size for path in self.directory.iterdir()), default=0)
            for writer in writers:
                writer.rlimit(psutil.RLIMIT_FSIZE, (largest + 100, resource.RLIM_INFINITY))
            return
        with self._ballast.open("wb", buffering=0) as file:
            for size in (65536, 4096, 1):
                with _until_full():
                    while True:
                        file.write(bytes(size))

    def free(self, writers: list[psutil.Process]) -> None:
        """Have room again."""
        for writer in writers if not self._mounted else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                writer.rlimit(psutil.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        self._ballast.unlink(missing_ok=True)


@contextlib.contextmanager
def _until_full() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[SmallDisk]:
    """A disk of its own at this directory."""
    directory.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={_SIZE_MIB}m", "switchyard-chaos", str(directory)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield SmallDisk(directory, mounted=mounted)
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(directory)], check=True)
