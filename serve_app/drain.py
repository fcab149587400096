"""`python -m serve_app drain`: empty this node before it is taken away. For a pod's preStop hook.

On a worker: tell Ray that the node goes. Serve then starts replacements elsewhere, stops the replicas here as soon
as they run, or when the time left is their `graceful_shutdown_timeout_s`, and each finishes its streams. This ends
when none is left. On the head: stay while somebody else in the cluster still drains, because Serve's controller,
which stops the replicas, runs here.

Ray has no public call for it: `ray drain-node` (2.60) is hidden from its help. It is used here only, and
`tests/e2e/test_cluster.py` holds it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

_POLL_S = 0.5
_TELL_TIMEOUT_S = 30
# A whole cluster is deleted at once; so long its workers may take to say that they drain.
_NOTICE_S = 20.0
_REPLICA = "ray::ServeReplica:"
_LEAVING = ("STOPPING", "PENDING_MIGRATION")


class DrainError(Exception):
    """This node cannot be drained. The message says why."""


def drain_worker(deadline_s: float, node_id: str | None = None, say: Callable[[str], None] = print) -> bool:
    """Empty this node, or the one of this id where several run on a machine. False: not all ended in time."""
    until = time.monotonic() + deadline_s
    raylet = _raylet(node_id)
    flags = dict(part.lstrip("-").split("=", 1) for part in raylet.cmdline() if part.startswith("--") and "=" in part)
    if problem := _tell(flags["gcs-address"], flags["node_id"], deadline_s):
        # Nobody is there to stop the replicas, but they go on serving what they have.
        say(f"Ray was not told that this node goes: {problem}")
    while left := _replicas(raylet):
        if time.monotonic() >= until:
            say(f"still there after {deadline_s:.0f} s: {', '.join(sorted(left))}")
            return False
        time.sleep(_POLL_S)
    return True


def drain_head(deadline_s: float) -> None:
    """Return when no replica of the cluster is on its way out, at the earliest when workers could have said so."""
    began = time.monotonic()
    while (waited_s := time.monotonic() - began) < deadline_s:
        if waited_s >= _NOTICE_S and not _somebody_leaves():
            return
        time.sleep(_POLL_S)


def _raylet(node_id: str | None) -> psutil.Process:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.name() == "raylet" and (node_id is None or f"--node_id={node_id}" in process.cmdline()):
                found.append(process)
    if len(found) != 1:
        raise DrainError(f"{len(found)} Ray nodes found on this machine" + (f" with id {node_id}" if node_id else ""))
    return found[0]


def _tell(address: str, node_id: str, deadline_s: float) -> str | None:
    command = [
        *(_ray(), "drain-node", "--address", address, "--node-id", node_id),
        *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the pod is deleted"),
        *("--deadline-remaining-seconds", str(int(deadline_s))),
    ]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=_TELL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"no answer within {_TELL_TIMEOUT_S} s"
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    return None if told.returncode == 0 else (told.stderr.strip().splitlines() or ["no reason given"])[-1]


def _ray() -> str:
    """Ray's command: beside this Python, as in a virtual environment, or elsewhere on the path, as in an image."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return shutil.which("ray", path=places) or "ray"


def _replicas(raylet: psutil.Process) -> set[str]:
    """Titles of Serve's replicas that run on this node."""
    titles = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in raylet.children():
            with contextlib.suppress(psutil.Error):
                if (title := " ".join(process.cmdline())).startswith(_REPLICA):
                    titles.add(title)
    return titles


def _somebody_leaves() -> bool:
    from ray import serve

    try:
        applications = serve.status().applications
    except Exception:  # Ray's client raises many types; without an answer there is nothing to stay for
        return False
    states = [
        deployment.replica_states
        for application in applications.values()
        for deployment in application.deployments.values()
    ]
    return any(found.get(state, 0) for found in states for state in _LEAVING)
