"""The service that the drills are done to: `deployments/prod.yaml` in its shape, on scripted engines.

On each node one replica at most of the hot model and of the Router, the pool on a GPU of its own, nothing on the head.
"""

from __future__ import annotations

import dataclasses
import json
import urllib.request
from collections.abc import Collection
from typing import Any

import yaml

from serve_app.telemetry.audit import read_records
from tests.e2e.fake_cluster import FakeCluster, FakeHead, FakeNodes
from tests.e2e.service import START_DEADLINE_S, Service, wait_until

NODES = FakeNodes(count=3, cpus=4, gpus=2, idle_s=5)
ROUTERS, HOT_MIN, HOT_MAX = 2, 2, 3
HOT, POOL, ROUTER = "Resident-hot", "LazyPool", "Router"
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def head(redis: str) -> FakeHead:
    """As in k8s/: nothing is placed on it, and its state is in Redis."""
    return FakeHead(cpus=0, dashboard=True, redis=redis)


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """One replica as Serve has it; `name` is what the audit calls it."""

    name: str
    deployment: str
    state: str
    node: str
    pid: int


class Deployed(Service):
    """Given to Serve by `serve deploy`, as KubeRay does it: no process of ours hangs on the head."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        models = [
            {
                "id": "hot",
                "tier": "resident",
                "context": 8192,
                "max_ongoing_requests": 16,
                "resources": {"num_cpus": 1, "num_gpus": 1},
                "fake": {"ttft_s": 0.05, "tpot_s": 0.02},
                "autoscaling": {
                    "min_replicas": HOT_MIN,
                    "max_replicas": HOT_MAX,
                    "target_ongoing_requests": 4,
                    "upscale_delay_s": 1,
                    "downscale_delay_s": 5,
                },
            },
            {
                "id": "lazy",
                "tier": "lazy",
                "context": 8192,
                "memory_gb": 1,
                "preload": True,
                "fake": {"load_s": 1, "ttft_s": 0.05, "tpot_s": 0.02},
            },
        ]
        super().__init__(
            models,
            address=cluster.address,
            environment=cluster.environment,
            router={"replicas": ROUTERS, "num_cpus": 0.5, "drain_s": 60},
            pool={"replicas": 1, "resources": {"num_cpus": 1, "num_gpus": 1}, "memory_gb": 4, "standby": False},
        )
        self._spread(yaml.safe_load(self.file.read_text()))

    def _spread(self, document: dict[str, Any]) -> None:
        document["applications"][0]["deployments"] = [
            {"name": name, "max_replicas_per_node": 1} for name in (ROUTER, HOT)
        ]
        self.file.write_text(yaml.safe_dump(document))

    def dashboard(self) -> str:
        """Where Ray's is."""
        return self._cluster.dashboard

    def start(self, *, wait: bool = True) -> None:
        """Deploy it, and wait until it is ready."""
        wait_until(self._reached, START_DEADLINE_S, "Ray's dashboard answers")
        self.serve("deploy", str(self.file))
        if wait:
            wait_until(self.complete, START_DEADLINE_S, "all replicas run")

    def change(self, **model: Any) -> None:
        """Deploy it with other settings of the hot model; with arguments of ours every replica is a new one then."""
        document = yaml.safe_load(self.file.read_text())
        document["applications"][0]["args"]["models"][0] |= model
        self.file.write_text(yaml.safe_dump(document))
        self.serve("deploy", str(self.file))

    def shutdown(self) -> None:
        """Take it away; the cluster stays."""
        self.serve("shutdown", "-y")

    def ray(self, path: str) -> dict[str, Any]:
        """What Ray's dashboard answers. Raises `OSError` where there is none."""
        token = {"authorization": f"Bearer {self._cluster.environment['RAY_AUTH_TOKEN']}"}
        with _direct.open(urllib.request.Request(self.dashboard() + path, headers=token), timeout=10) as answer:
            return dict(json.loads(answer.read()))

    def _reached(self) -> bool:
        try:
            return bool(self.ray("/api/version"))
        except OSError:
            return False

    def nodes(self) -> set[str]:
        """The GPU nodes that Ray has for alive."""
        answer = self.ray("/api/v0/nodes")
        if not answer["result"]:
            raise OSError(answer["msg"])
        found = answer["data"]["result"]["result"]
        return {node["node_id"] for node in found if node["state"] == "ALIVE" and not node["is_head_node"]}

    def application(self) -> dict[str, Any]:
        """Serve's account of it; empty where there is none."""
        return dict(self.ray("/api/serve/applications/")["applications"].get("switchyard", {}))

    def placed(self) -> list[Placed]:
        """Its replicas."""
        return [
            # One that starts has no node and no process yet.
            Placed(replica["replica_id"], name, replica["state"], replica.get("node_id") or "", replica.get("pid") or 0)
            for name, deployment in self.application().get("deployments", {}).items()
            for replica in deployment["replicas"]
        ]

    def complete(self, hot: int = HOT_MIN, without: Collection[str] = ()) -> bool:
        """Whether Serve says that it is done, and all replicas run, on nodes that are alive, none of them of these."""
        try:
            status, placed, nodes = self.application().get("status"), self.placed(), self.nodes()
        except OSError:
            return False
        if status != "RUNNING" or any(one.name in without for one in placed):
            return False
        running = [one.deployment for one in placed if one.state == "RUNNING" and one.node in nodes]
        counted = {name: running.count(name) for name in (ROUTER, HOT, POOL)}
        return counted[ROUTER] == ROUTERS and counted[HOT] >= hot and counted[POOL] == 1 and self.ready()

    def records(self) -> dict[str, dict[str, Any]]:
        """The audit by request."""
        return {str(record["request"]): record for record in read_records(self.scratch / "audit")}
