"""Engines that share a GPU start one after the other, whichever replicas of this machine they belong to.

vLLM takes every change of a card's free memory between its first look and the end of its profile run for its own
(0.32, `Worker.determine_available_memory`). Of two that start together on one card each counts the other's weights:
its KV cache is too small for as long as it runs, or none is left and it does not start (vllm-project/vllm#55827).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def turn(devices: str | None, directory: Path | None = None) -> Iterator[None]:
    """Wait until no other process has the turn on one of these GPUs, and keep the others waiting.

    `devices` as in `CUDA_VISIBLE_DEVICES`; None: all there are. The operating system takes a turn from a process that
    ends. Where its files cannot be opened nobody waits.
    """
    with contextlib.ExitStack() as held:
        # Always in the same order, so that no two wait for each other.
        for name in sorted(set(_names(devices))):
            path = (directory or Path(tempfile.gettempdir())) / f"switchyard-{os.getuid()}-gpu-{name}.lock"
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                logger.warning("%s: %s; an engine may start beside another one", path, error.strerror)
                continue
            held.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # The engine core that is forked meanwhile has the file open as well, and keeps what is only closed.
            held.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)
        yield


def _names(devices: str | None) -> list[str]:
    if devices is None:
        return ["all"]
    return [re.sub(r"[^A-Za-z0-9-]", "_", name) for name in map(str.strip, devices.split(",")) if name]
