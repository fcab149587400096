"""Where a Python process spends its time while a load runs: py-spy's samples, by stage of a request."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

# Ray Serve depends on it, so it is there; looked for beside the interpreter first.
_PROGRAM = "py-spy"
_RATE_HZ = 500
_FRAME = re.compile(r"(?P<function>.+) \((?P<file>[^()]*?)(?::(?P<line>\d+))?\)")
# The first that a stack's frame lies in, from the innermost outwards, is the stage to which a sample belongs.
_STAGES = (
    ("serve_app/router/listener.py", "event loop and sockets (uvloop)"),
    ("serve_app/router/", None),
    ("serve_app/routing/", "routing (facts, decision, outgoing body)"),
    ("serve_app/telemetry/", "audit, metrics, tracing"),
    ("serve_app/scoring/", "scorer"),
    ("serve_app/admission/", "admission"),
    ("serve_app/models/", "table of replicas"),
    ("uvicorn/", "uvicorn (server)"),
    ("starlette/", "starlette (routes, headers)"),
)


class ProfileError(Exception):
    """No profile could be taken. The message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """Shares of the samples in which the process held its interpreter lock: by stage, and by innermost function.

    What the event loop does without the lock (waiting, reading sockets) is not among them.
    """

    samples: int
    stages: list[tuple[str, float]]
    functions: list[tuple[str, float]]


class Recording:
    """py-spy, attached to a process until it has recorded for so long.

    Only a thread that holds the interpreter lock is sampled: py-spy takes Ray's sleeping threads for busy ones.
    """

    def __init__(self, pid: int, seconds: float) -> None:
        beside = Path(sys.executable).parent / _PROGRAM
        program = str(beside) if beside.exists() else shutil.which(_PROGRAM)
        if program is None:
            raise ProfileError(f"{_PROGRAM} is not installed; `pip install {_PROGRAM}` into this environment")
        self._scratch = tempfile.TemporaryDirectory(prefix="sw-profile-")
        self._raw = Path(self._scratch.name) / "raw"
        command = [program, "record", "--pid", str(pid), "--rate", str(_RATE_HZ), "--format", "raw", "--gil"]
        command += ["--duration", str(max(1, round(seconds))), "--output", str(self._raw)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def profile(self) -> Profile:
        """Wait for its end, and sum up. Raises `ProfileError`."""
        said, _ = self._process.communicate(timeout=120)
        if self._process.returncode or not self._raw.exists():
            raise ProfileError(f"{_PROGRAM} failed: {said.strip()[-300:]}")
        stacks = self._raw.read_text().splitlines()
        self._scratch.cleanup()
        return summed(stacks)


def summed(stacks: Sequence[str]) -> Profile:
    """Sum stacks in the collapsed form, `outer;...;inner COUNT` a line."""
    stages: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for line in stacks:
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        stages[_stage(frames)] += int(count)
        functions[_name(frames[-1])] += int(count)
    total = stages.total() or 1
    return Profile(
        stages.total(),
        [(name, count / total) for name, count in stages.most_common()],
        [(name, count / total) for name, count in functions.most_common(25)],
    )


def _stage(frames: Sequence[str]) -> str:
    for frame in reversed(frames):
        for part, stage in _STAGES:
            if part in frame and (found := _FRAME.fullmatch(frame)):
                return stage or "router/" + Path(found["file"]).name
    return "other threads (Ray Serve, audit)"


def _name(frame: str) -> str:
    """`function file:line` of one frame, the file without most of its directories."""
    found = _FRAME.fullmatch(frame)
    if not found:
        return frame
    return f"{found['function']} ({'/'.join(Path(found['file']).parts[-2:])})"
