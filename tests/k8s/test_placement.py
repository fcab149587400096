"""Room for every replica: by GPUs, shares of them, CPUs, custom resources, memory, and a Router on every node."""

from __future__ import annotations

from typing import Any

import pytest

from tests.k8s.changes import changed, deployed, pod, worker
from tests.k8s.conftest import Documents, found_in
from tools.k8s_check.schemas import KubeRay


def resize(spec: dict[str, Any], **amounts: str) -> None:
    for kind in ("requests", "limits"):
        pod(spec)["containers"][0]["resources"][kind].update(amounts)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda spec: worker(spec).update(replicas=1, minReplicas=1, maxReplicas=1), "no room for"),
        (lambda spec: resize(spec, cpu="4"), "no room for"),
        (lambda spec: resize(spec, cpu="2"), "no group has room for a replica of Resident-qwen3-14b: 4 CPUs, 1 GPUs"),
        (lambda spec: resize(spec, memory="90Gi"), "pool.host_memory_gb 96"),
        (lambda spec: worker(spec).update(resources={"gold": "1"}, maxReplicas=40), "40 nodes for 4 replicas at most"),
    ],
)
def test_a_cluster_that_is_too_small_is_told(
    builds: dict[str, Documents], kuberay: KubeRay, change: Any, said: str
) -> None:
    assert said in found_in(changed(builds["base"], change), kuberay)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda app, args: args["models"][0].update(replicas=3), "no room for"),
        (
            lambda app, args: args["models"][0]["resources"].update(num_gpus=2),
            "no group has room for a replica of Resid",
        ),
        (lambda app, args: args["pool"]["resources"].update(custom={"gold": 1}), "LazyPool: 4 CPUs, 1 GPUs, gold 1"),
        (lambda app, args: args["pool"].update(replicas=3), "no room for LazyPool"),
        (lambda app, args: args["router"].update(replicas=1), "router.replicas: 1 for 2 nodes that are always there"),
        (lambda app, args: app.pop("deployments"), "Router needs max_replicas_per_node: 1"),
        (lambda app, args: args["router"].update(port=9000), "front-door must be 9000, and is 8000"),
        (lambda app, args: args["router"].update(host="127.0.0.1"), "must be 0.0.0.0, or nobody gets in"),
        (lambda app, args: args.update(engine_host="127.0.0.1"), "engine_host: must be node"),
        (lambda app, args: args["security"].pop("keys_file"), "security.keys_file: unset is not in a mounted secret"),
        (lambda app, args: args["audit"].update(directory=".audit"), "audit.directory: .audit is on no volume"),
        (lambda app, args: args["security"].update(redis_url="redis://cache:6379/0"), "cache:6379 is no Service here"),
        (lambda app, args: args["models"].pop(), ""),
        (lambda app, args: args["models"][2].update(source="Qwen/Qwen3-8B"), "does not download the models of serve"),
    ],
)
def test_a_deployment_that_does_not_fit_its_cluster_is_told(
    builds: dict[str, Documents], kuberay: KubeRay, change: Any, said: str
) -> None:
    found = found_in(deployed(builds["base"], change), kuberay)
    assert (said in found) if said else (found == "")


def test_shares_of_one_gpu_are_added_up(builds: dict[str, Documents], kuberay: KubeRay) -> None:
    over = deployed(builds["single-gpu"], lambda app, args: args["pool"]["resources"].update(num_gpus=0.5))
    assert "no room for" in found_in(over, kuberay)
