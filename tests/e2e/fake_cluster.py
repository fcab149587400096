"""A Ray cluster on this machine whose GPU nodes are fake, and come and go as Ray's autoscaler wants.

Each node is a raylet of its own with the resources that we say (`fake_nodes`). Ray's own wrapper,
`ray.cluster_utils.AutoscalingCluster`, lacks a file in the 2.60 wheel and begins with `ray stop --force`, which would
end every Ray on the machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import yaml

from tests.e2e.fake_nodes import MARK, NODE, processes_with
from tests.e2e.service import POLL_S, REPOSITORY
from tests.ports import free_port

_BIN = Path(sys.executable).parent
_HEAD_TYPE = "ray.head.default"
_HEAD_ID = "f" * 51 + "00000"
_START_DEADLINE_S = 60
# A raylet (2.60) ends itself when its agent takes 15 s to start, as on a busy machine (ray-project/ray#65983).
# Kubernetes and systemd start it again; so do we, and the autoscaler.
_ATTEMPTS = 3
# Answers each line on stdin with what is there now. Whatever Ray prints goes to stderr, not between the answers.
_OBSERVER = """
import json, os, ray, sys
from ray import serve
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
ray.init(address=sys.argv[1], logging_level="error", log_to_driver=False)
for line in sys.stdin:
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    deployments = [found for app in serve.status().applications.values() for found in app.deployments.items()]
    starting, running = ({name: deployment.replica_states.get(state, 0) for name, deployment in deployments}
                         for state in ("STARTING", "RUNNING"))
    print(json.dumps({"gpu_nodes": len(nodes), "starting": starting, "running": running}), file=answers, flush=True)
"""


@dataclasses.dataclass(frozen=True, slots=True)
class FakeNodes:
    """What each fake GPU node has, how many there may be, and when an unused one goes."""

    count: int = 3
    cpus: int = 1
    gpus: int = 1
    idle_s: float = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class FakeHead:
    """The head node. With `redis` (host:port) it keeps its state there, and a new head takes it up again."""

    cpus: int = 2
    dashboard: bool = False
    redis: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """GPU nodes that are alive, and by deployment the replicas that start and those that run."""

    gpu_nodes: int
    starting: dict[str, int]
    running: dict[str, int]


class FakeCluster:
    """A running cluster; `address` is what `serve run --address` takes, in the `environment` given here."""

    def __init__(self, nodes: FakeNodes, head: FakeHead = FakeHead()) -> None:
        # Short: Ray puts sockets below it, and their paths may have 107 characters.
        self.scratch = Path(tempfile.mkdtemp(prefix="sw-", dir="/tmp"))
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_TMPDIR": str(self.scratch),
            "RAY_worker_niceness": "0",
            # Whole seconds; by default the autoscaler looks every 5.
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            # As KubeRay has it. Version 1 takes fake nodes for dead and tries to reach them by SSH.
            "RAY_enable_autoscaler_v2": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONPATH": str(REPOSITORY),
            MARK: self.scratch.name,
        }
        # By the name of its type, as KubeRay gives it, the autoscaler of a new head knows the old one.
        self._head_environment = {NODE: _HEAD_ID, "RAY_NODE_TYPE_NAME": _HEAD_TYPE} | (
            {"RAY_REDIS_ADDRESS": head.redis} if head.redis else {}
        )
        dashboard_port = free_port() if head.dashboard else 0
        self.dashboard = f"http://127.0.0.1:{dashboard_port}" if head.dashboard else ""
        (self.scratch / "nodes").mkdir()
        config = self.scratch / "autoscaling.yaml"
        config.write_text(yaml.safe_dump(self._autoscaling(nodes, head)))
        self._start = [
            *(str(_BIN / "ray"), "start", "--head", f"--port={port}", "--node-ip-address=127.0.0.1"),
            *(f"--autoscaling-config={config}", f"--temp-dir={self.scratch}"),
            *(f"--num-cpus={head.cpus}", "--num-gpus=0", "--object-store-memory=80000000", "--disable-usage-stats"),
            *(f"--include-dashboard={str(head.dashboard).lower()}", "--dashboard-host=127.0.0.1"),
            *([f"--dashboard-port={dashboard_port}"] if head.dashboard else []),
        ]
        self._observer: subprocess.Popen[str] | None = None

    def _autoscaling(self, nodes: FakeNodes, head: FakeHead) -> dict[str, object]:
        return {
            "cluster_name": self.scratch.name,
            "max_workers": nodes.count,
            "idle_timeout_minutes": nodes.idle_s / 60,
            "upscaling_speed": 10,
            "provider": {
                "type": "external",
                "module": "tests.e2e.fake_nodes.LastingNodes",
                "folder": str(self.scratch / "nodes"),
                "gcs_address": self.address,
                "launch_multiple": True,
                "head_node_id": _HEAD_ID,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
            },
            "head_node_type": _HEAD_TYPE,
            "available_node_types": {
                _HEAD_TYPE: {"resources": {"CPU": head.cpus}, "node_config": {}, "max_workers": 0},
                "gpu": {
                    "resources": {"CPU": nodes.cpus, "GPU": nodes.gpus, "object_store_memory": 80_000_000},
                    "node_config": {},
                    "min_workers": 0,
                    "max_workers": nodes.count,
                },
            },
            "auth": {},
            "docker": {},
            "initialization_commands": [],
            "setup_commands": [],
            "head_setup_commands": [],
            "worker_setup_commands": [],
            "head_start_ray_commands": [],
            "worker_start_ray_commands": [],
            "file_mounts": {},
            "cluster_synced_files": [],
            "file_mounts_sync_continuously": False,
            "rsync_exclude": [],
            "rsync_filter": [],
        }

    def start(self) -> None:
        """Start the head node, or one in the place of a killed one; GPU nodes come when something asks for them."""
        environment = {**os.environ, **self.environment}
        log = self.scratch / "start.log"
        for _ in range(_ATTEMPTS):
            with log.open("wb") as output:
                done = subprocess.run(
                    self._start,
                    env={**environment, **self._head_environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    timeout=_START_DEADLINE_S,
                )
            if done.returncode == 0:
                break
            kill(self.of_node(_HEAD_ID))
        assert done.returncode == 0, log.read_text()
        self._observer = subprocess.Popen(
            [sys.executable, "-c", _OBSERVER, self.address],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def look(self) -> Snapshot:
        """What is there now."""
        assert self._observer
        assert self._observer.stdin
        assert self._observer.stdout
        self._observer.stdin.write("\n")
        self._observer.stdin.flush()
        return Snapshot(**json.loads(self._observer.stdout.readline()))

    def stop(self) -> None:
        """End every process of this cluster, and no other, and remove its files."""
        while family := self.family():
            kill(family)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def family(self) -> list[psutil.Process]:
        """Every process of this cluster."""
        return list(processes_with(**{MARK: self.scratch.name}))

    def of_node(self, node_id: str) -> list[psutil.Process]:
        """The processes of one GPU node."""
        return list(processes_with(**{MARK: self.scratch.name, NODE: node_id}))

    def kill_head(self) -> None:
        """Kill all that runs on the head, at once; GPU nodes stay. `start` puts another in its place."""
        if self._observer:
            self._observer.kill()
            self._observer.wait()
        kill(self.of_node(_HEAD_ID))


def kill(processes: list[psutil.Process]) -> None:
    """Stop all of them first, so that none sees another die; then kill them."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=POLL_S)


@contextlib.contextmanager
def fake_cluster(nodes: FakeNodes = FakeNodes(), head: FakeHead = FakeHead()) -> Iterator[FakeCluster]:
    """A cluster that is gone afterwards, whatever happened."""
    cluster = FakeCluster(nodes, head)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
