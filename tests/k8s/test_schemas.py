"""Where KubeRay's schema comes from, and how strictly it is read."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.changes import changed, worker
from tests.k8s.conftest import Documents, found_in
from tools.k8s_check.manifests import CheckError
from tools.k8s_check.schemas import KubeRay, find_crd


def test_another_release_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ray.io_rayservices.yaml").write_text("spec: {}\n")
    with pytest.raises(CheckError, match=r"not the one of KubeRay v1\.7\.0"):
        find_crd(tmp_path, tmp_path)


def test_without_folder_and_network_it_is_said_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*args: Any, **options: Any) -> None:
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    with pytest.raises(CheckError, match="give the folder by --crds"):
        find_crd(None, tmp_path / "checkout")


def test_a_folder_without_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match=r"holds no ray\.io_rayservices\.yaml"):
        find_crd(tmp_path, tmp_path)


def test_defaults_are_applied_before_the_rules(builds: dict[str, Documents], kuberay: KubeRay) -> None:
    """Without `replicas` KubeRay's schema says 0, which is less than minReplicas."""
    (document,) = (each for each in builds["base"] if each["kind"] == "RayService")
    del worker(changed([document], lambda spec: worker(spec).pop("replicas"))[0]["spec"])["minReplicas"]
    complete = kuberay.with_defaults(changed([document], lambda spec: worker(spec).pop("replicas"))[0])
    assert worker(complete["spec"])["replicas"] == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda spec: spec.update(servConfigV2=""), "spec: servConfigV2: no such field"),
        (lambda spec: worker(spec).update(maxReplica=3), "workerGroupSpecs[0]: maxReplica: no such field"),
        (lambda spec: worker(spec)["template"]["spec"].update(nodeSelectr={}), "nodeSelectr: no such field"),
        (lambda spec: worker(spec).update(minReplicas="2"), "is not of type 'integer'"),
        (lambda spec: spec["rayClusterConfig"]["autoscalerOptions"].update(version="v3"), "'v3' is not one of"),
        (lambda spec: spec["rayClusterConfig"].pop("headGroupSpec"), "'headGroupSpec' is a required property"),
        (
            lambda spec: worker(spec)["template"]["spec"]["containers"].append({"name": "ray-worker"}),
            "there is another with ray-worker",
        ),
    ],
)
def test_what_the_api_server_would_refuse_is_refused(
    builds: dict[str, Documents], kuberay: KubeRay, change: Any, said: str
) -> None:
    assert said in found_in(changed(builds["base"], change), kuberay)
