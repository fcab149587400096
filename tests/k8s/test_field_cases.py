"""Faults that people reported on Kubernetes, and what stands before each here."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _get_ray_resources_from_group_spec

from serve_app.check import problems
from tests.k8s.changes import changed, deployed, head, pod, ray_service, worker
from tests.k8s.conftest import NAMES, Documents, found_in
from tools.k8s_check.placement import _group
from tools.k8s_check.pods import groups
from tools.k8s_check.schemas import KubeRay

Change = Callable[[dict[str, Any]], Any]


def drop_drain(spec: dict[str, Any]) -> None:
    del pod(spec)["containers"][0]["lifecycle"]


# That a stream survives it: tests/e2e/test_cluster.py.
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop_drain, "preStop: must run python3 -m serve_app drain"),
        (lambda spec: pod(spec).update(terminationGracePeriodSeconds=30), "must be 10 more than 720"),
        (lambda spec: pod(spec)["containers"][0]["lifecycle"]["preStop"]["exec"]["command"].pop(), "must run python3"),
        (lambda spec: head(spec)["template"]["spec"].update(terminationGracePeriodSeconds=60), "must be 10 more than"),
    ],
)
def test_a_drained_node_has_time_for_its_streams(
    builds: dict[str, Documents], kuberay: KubeRay, change: Change, said: str
) -> None:
    """ray-project/ray#41726"""
    assert said in found_in(changed(builds["base"], change), kuberay)


def test_longer_streams_need_longer_drains(builds: dict[str, Documents], kuberay: KubeRay) -> None:
    longer = deployed(builds["base"], lambda app, args: args["router"].update(drain_s=1800))
    assert "--deadline-s 720: its load, router.leave_s and drain_s need 1917" in found_in(longer, kuberay)


def test_a_router_that_is_replaced_stays_until_nobody_is_sent_to_it(
    builds: dict[str, Documents], kuberay: KubeRay
) -> None:
    sooner = deployed(builds["base"], lambda app, args: args["router"].update(leave_s=10))
    assert "notices after 10 s that a Router goes; router.leave_s: 10 must be more" in found_in(sooner, kuberay)


@pytest.mark.parametrize("name", NAMES)
def test_the_front_door_spans_the_clusters_of_an_upgrade(builds: dict[str, Documents], name: str) -> None:
    """ray-project/kuberay#4799, #1559: no Service is switched; pods join when ready, and leave when deleted."""
    services = {each["metadata"]["name"]: each for each in builds[name] if each["kind"] == "Service"}
    assert not any(key.startswith("ray.io/") for key in services["switchyard"]["spec"]["selector"])
    for group in groups(ray_service(builds[name])):
        probe = group["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"]
        assert probe == {"path": "/ready", "port": "front-door"}


def test_a_probe_that_lets_a_cluster_in_before_it_serves_is_refused(
    builds: dict[str, Documents], kuberay: KubeRay
) -> None:
    """ray-project/kuberay#1559"""
    early = changed(
        builds["base"], lambda spec: pod(spec)["containers"][0]["readinessProbe"]["httpGet"].update(path="/health")
    )
    assert "must ask /ready" in found_in(early, kuberay)


def test_nobody_gets_twice_the_gpus_without_asking(builds: dict[str, Documents], kuberay: KubeRay) -> None:
    """ray-project/kuberay#1476"""
    for documents in builds.values():
        assert ray_service(documents)["spec"]["upgradeStrategy"] == {"type": "None"}
    silent = changed(builds["base"], lambda spec: spec.pop("upgradeStrategy"))
    assert "would start a second cluster, with as many GPUs" in found_in(silent, kuberay)


@pytest.mark.parametrize("name", NAMES)
def test_rays_autoscaler_knows_the_gpus_of_groups_at_zero(builds: dict[str, Documents], name: str) -> None:
    """ray-project/kuberay#321. Its own reading of a group is private; here it is only compared with ours."""
    for group in groups(ray_service(builds[name])):
        theirs, ours = _get_ray_resources_from_group_spec(group, is_head=False), _group(group)
        assert not isinstance(ours, str)
        assert (ours.cpus, ours.gpus) == (theirs["CPU"], theirs["GPU"])
        assert ours.custom == {key: theirs[key] for key in ours.custom}


def test_a_group_whose_gpus_ray_would_not_know_is_refused(builds: dict[str, Documents], kuberay: KubeRay) -> None:
    """ray-project/kuberay#321"""

    def forget(spec: dict[str, Any]) -> None:
        for kind in ("requests", "limits"):
            del pod(spec, 1)["containers"][0]["resources"][kind]["nvidia.com/gpu"]

    assert "no group has room for a replica of LazyPool" in found_in(changed(builds["spot"], forget), kuberay)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda app: app.update(import_path="serve_app.ap:build"), "import_path: serve_app.app:build"),
        (lambda app: app["deployments"][0].update(name="Ruter"), "applications[0].deployments[0].name: there is no"),
        (lambda app: app.update(route_prefx="/"), "applications[0].route_prefx: no such key"),
    ],
)
def test_an_application_that_could_never_start_is_named(
    builds: dict[str, Documents], tmp_path: Path, change: Change, said: str
) -> None:
    """ray-project/kuberay#3467"""
    config = yaml.safe_load(ray_service(builds["base"])["spec"]["serveConfigV2"])
    change(config["applications"][0])
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    assert any(said in problem for problem in problems(file)), problems(file)


def test_two_applications_on_one_route_are_named(builds: dict[str, Documents], tmp_path: Path) -> None:
    """ray-project/kuberay#3467"""
    config = yaml.safe_load(ray_service(builds["base"])["spec"]["serveConfigV2"])
    config["applications"].append({"name": "other", "import_path": "a:b", "route_prefix": "/"})
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    assert any("duplicate applications for route prefix" in problem for problem in problems(file)), problems(file)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda spec: head(spec)["rayStartParams"].update({"num-cpus": "2"}), 'num-cpus: must be "0"'),
        (lambda spec: spec["rayClusterConfig"].pop("gcsFaultToleranceOptions"), "all workers would be replaced"),
        (lambda spec: spec.update(excludeHeadPodFromServeSvc=False), "excludeHeadPodFromServeSvc: must be true"),
    ],
)
def test_requests_do_not_depend_on_the_head(
    builds: dict[str, Documents], kuberay: KubeRay, change: Change, said: str
) -> None:
    """ray-project/kuberay#615, #1420"""
    assert said in found_in(changed(builds["base"], change), kuberay)


@pytest.mark.parametrize("name", NAMES)
def test_slow_models_are_no_applications_that_hold_back_the_hot_one(builds: dict[str, Documents], name: str) -> None:
    """ray-project/kuberay#1803: one application, whose pool is running before it has loaded anything."""
    config = yaml.safe_load(ray_service(builds[name])["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    assert [model["id"] for model in application["args"]["models"] if model["tier"] == "resident"] == ["qwen3-14b"]
    assert worker(ray_service(builds[name])["spec"])["minReplicas"] >= 1


def test_a_node_can_be_drained_while_the_hot_model_is_away(builds: dict[str, Documents], kuberay: KubeRay) -> None:
    """kubernetes/kubernetes#72320: nobody is ready then, and the budget would keep every pod where it is."""
    cautious = copy.deepcopy(builds["base"])
    budget = next(each for each in cautious if each["kind"] == "PodDisruptionBudget")
    del budget["spec"]["unhealthyPodEvictionPolicy"]
    assert "must be AlwaysAllow: a node whose pods are not ready" in found_in(cautious, kuberay)
