"""Free ports for what the tests start: nothing else takes them between the choice and the start."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
from collections.abc import Iterator

# Below those that Linux gives to connections and to whoever asks for any port, beyond those of Ray's workers.
_FIRST, _LAST = 20_000, 32_000


def free_port() -> int:
    """A port of loopback that is free, and that no other process of this run of pytest is given."""
    for port in _turns:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("a cycle has no end")


def _own() -> Iterator[int]:
    """Those of this process, from anywhere among them on: another run of pytest may be under way."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = range(_FIRST + worker, _LAST, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    start = secrets.randbelow(len(ports))
    return itertools.cycle([*ports[start:], *ports[:start]])


_turns = _own()
