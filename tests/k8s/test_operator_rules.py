"""What KubeRay 1.7 refuses although its schema allows it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.k8s.changes import changed, head, pod, ray_service, worker
from tests.k8s.conftest import Documents, found_in
from tools.k8s_check.schemas import KubeRay


def cluster(spec: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = spec["rayClusterConfig"]
    return found


def twin(spec: dict[str, Any]) -> None:
    cluster(spec)["workerGroupSpecs"].append(copy.deepcopy(worker(spec)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda spec: spec["upgradeStrategy"].update(type="Recreate"), "Recreate is none of None, NewCluster"),
        (
            lambda spec: spec["upgradeStrategy"].update(type="NewClusterWithIncrementalUpgrade"),
            "needs them, and a feature",
        ),
        (lambda spec: cluster(spec).update(upgradeStrategy={"type": "None"}), "the RayService has its own"),
        (twin, "another group is called gpu-80gb"),
        (lambda spec: worker(spec).update(minReplicas=4), "is not between minReplicas 4 and maxReplicas 2"),
        (lambda spec: worker(spec).update(suspend=True), "is refused with the autoscaler"),
        (lambda spec: worker(spec).update(groupName="GPU_80"), "must hold a-z, 0-9 and -"),
        (
            lambda spec: (
                worker(spec)["rayStartParams"].update({"num-gpus": "1"}),
                worker(spec).update(resources={"x": "1"}),
            ),
            "resources and rayStartParams.num-gpus: only one of them",
        ),
        (lambda spec: worker(spec)["rayStartParams"].update(labels="a=b"), "use the group's labels"),
        (lambda spec: worker(spec)["rayStartParams"].update({"num-gpu": "1"}), "`ray start` has no --num-gpu"),
        (lambda spec: pod(spec).update(restartPolicy="Always"), "must be Never with autoscaler v2"),
        (
            lambda spec: head(spec)["template"]["spec"]["containers"][0].update(
                env=[{"name": "REDIS_PASSWORD", "value": "x"}]
            ),
            "REDIS_PASSWORD: gcsFaultToleranceOptions says that",
        ),
        (lambda spec: cluster(spec)["gcsFaultToleranceOptions"].update(backend="rocksdb"), "needs a feature gate"),
        (lambda spec: cluster(spec)["autoscalerOptions"].pop("version"), "must be v2"),
        (lambda spec: cluster(spec).update(enableInTreeAutoscaling=False), "replicas ask for nodes"),
        (lambda spec: cluster(spec)["authOptions"].update(mode="disabled"), "must be token"),
        (lambda spec: cluster(spec)["authOptions"].update(enableK8sTokenAuth=True), "is refused in a RayService"),
        (lambda spec: cluster(spec).update(rayVersion="2.59.0"), "pyproject.toml has 2.60.0"),
        (
            lambda spec: cluster(spec).update(networkPolicy={"mode": "DenyAll"}),
            "the feature gate RayClusterNetworkPolicy",
        ),
        (
            lambda spec: worker(spec)["template"]["metadata"]["labels"].update({"app.kubernetes.io/name": "x"}),
            "app.kubernetes.io/name is KubeRay's",
        ),
    ],
)
def test_what_the_operator_would_refuse_is_refused(
    builds: dict[str, Documents], kuberay: KubeRay, change: Any, said: str
) -> None:
    assert said in found_in(changed(builds["base"], change), kuberay)


def test_a_name_that_leaves_no_room_for_kuberays_own_is_refused(builds: dict[str, Documents], kuberay: KubeRay) -> None:
    documents = copy.deepcopy(builds["base"])
    ray_service(documents)["metadata"]["name"] = "s" * 48
    assert "longer than 47 characters" in found_in(documents, kuberay)
