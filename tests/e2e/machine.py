"""The machine, of which the tests of several pytest workers have a share each, until one needs all of it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


class Machine:
    """Locks between processes. Whoever comes is let in in turn: sharers cannot keep out one who wants to be alone."""

    def __init__(self) -> None:
        self._turn = os.open(Path(__file__).parent, os.O_RDONLY)
        self._place = os.open(__file__, os.O_RDONLY)

    def _enter(self, how: int) -> None:
        fcntl.flock(self._turn, fcntl.LOCK_EX)
        fcntl.flock(self._place, how)
        fcntl.flock(self._turn, fcntl.LOCK_UN)

    def _leave(self) -> None:
        fcntl.flock(self._place, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Beside what others do."""
        self._enter(fcntl.LOCK_SH)
        try:
            yield
        finally:
            self._leave()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Within `shared`: when the others' tests have ended, and before their next ones begin."""
        self._leave()
        self._enter(fcntl.LOCK_EX)
        try:
            yield
        finally:
            self._leave()
            self._enter(fcntl.LOCK_SH)
