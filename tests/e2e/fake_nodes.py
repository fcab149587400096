"""Ray's provider of fake nodes made as lasting as a cloud: nodes outlive the head, and one that was killed is gone.

Ray's own keeps them in memory: a new head would not know the nodes of the old one, and a dead node would count.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider

# Everything that belongs to a cluster has its name in this variable.
MARK = "SWITCHYARD_FAKE_CLUSTER"
# A raylet and all below it have the name of their node in this one, which is Ray's.
NODE = "RAY_CLOUD_INSTANCE_ID"
_END_S = 5.0


def processes_with(**variables: str) -> Iterator[psutil.Process]:
    """What was started with these in its environment, wherever it hangs in the tree of processes by now."""
    wanted = {f"{name}={value}".encode() for name, value in variables.items()}
    for process in psutil.process_iter():
        # Not `psutil`'s `environ`: it ends where a process has written its title over the first variables.
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if wanted <= set(environment) and process.status() != psutil.STATUS_ZOMBIE:
                yield process


class LastingNodes(FakeMultiNodeProvider):  # type: ignore[misc] # Ray is not typed
    """Keeps a file for each node, with the raylet's process and its tags, in `folder` of the provider's settings."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        # In the head's environment it would give each new head the id of the old one, which Ray knows as dead.
        os.environ["RAY_FAKE_CLUSTER"] = "1"
        super().__init__(provider_config, cluster_name)
        self._folder = Path(provider_config["folder"])
        files = list(self._folder.iterdir())
        for file in files:
            self._nodes[file.name] = {"tags": json.loads(file.read_text())["tags"]}
        self._next_node_id = len(files)

    def _create_node_with_resources_and_labels(self, *args: Any) -> None:
        before = set(self._nodes)
        super()._create_node_with_resources_and_labels(*args)
        (node_id,) = set(self._nodes) - before
        raylet = next(process for process in self._processes(node_id) if process.name() == "raylet")
        kept = {"raylet": raylet.pid, "tags": self._nodes[node_id]["tags"]}
        (self._folder / node_id).write_text(json.dumps(kept))

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        """The provider's question; asked every second."""
        with self.lock:
            for node_id in set(self._nodes) - {self._head_node_id}:
                if not self._alive(node_id):
                    del self._nodes[node_id]
            return list(super().non_terminated_nodes(tag_filters))

    def _alive(self, node_id: str) -> bool:
        raylet = json.loads((self._folder / node_id).read_text())["raylet"]
        try:
            return psutil.Process(raylet).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def terminate_node(self, node_id: str) -> None:
        """The provider's order; Ray has drained the node."""
        with self.lock:
            self._nodes.pop(node_id, None)
        processes = list(self._processes(node_id))
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        _, left = psutil.wait_procs(processes, timeout=_END_S)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _processes(self, node_id: str) -> Iterator[psutil.Process]:
        return processes_with(**{MARK: os.environ[MARK], NODE: node_id})
