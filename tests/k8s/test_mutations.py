"""`make k8s-check` is green, and red for single faults: 200 of them by chance, or every one with --all-mutations."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.k8s.conftest import INGRESS, NAMES, Documents, found_in
from tests.k8s.mutation import mutations
from tools.k8s_check.check import all_problems
from tools.k8s_check.generate import drift, write
from tools.k8s_check.manifests import CheckError, build, file_problems, kustomize
from tools.k8s_check.schemas import KubeRay

SEED = 20_260
COUNT = 200


@pytest.mark.parametrize("name", [*NAMES, INGRESS])
def test_what_we_ship_is_right(builds: dict[str, Documents], kuberay: KubeRay, name: str) -> None:
    assert found_in(builds[name], kuberay) == ""


def test_every_fault_that_matters_is_found(
    builds: dict[str, Documents], kuberay: KubeRay, pytestconfig: pytest.Config
) -> None:
    planted = [
        (name, mutation)
        for name, documents in builds.items()
        for mutation in mutations(documents)
        if mutation.matters and (name in ("base", INGRESS) or mutation.owner == "RayService/switchyard")
    ]
    assert len(planted) > 5000
    if not pytestconfig.getoption("--all-mutations", default=False):
        planted = random.Random(SEED).sample(planted, COUNT)
    unseen = [
        f"{name}: {mutation}"
        for name, mutation in planted
        if not all_problems(mutation.planted(builds[name]), kuberay, engines=False)
    ]
    assert unseen == []


def test_few_faults_are_harmless(builds: dict[str, Documents]) -> None:
    every = list(mutations(builds["base"]))
    assert sum(not mutation.matters for mutation in every) < len(every) / 40


# In the files themselves


@pytest.mark.parametrize(
    ("file", "before", "after", "said"),
    [
        ("base/kustomization.yaml", "resources:", "resorces:", "resorces"),
        ("base/kustomization.yaml", "- redis.yaml", "- redsi.yaml", "redsi.yaml"),
        ("overlays/spot/worker-groups.yaml", "workerGroupSpecs/1/replicas", "workerGroupSpecs/9/replicas", "9"),
        ("overlays/spot/kustomization.yaml", "target: {kind", "taget: {kind", "taget"),
    ],
)
def test_a_typo_that_kustomize_sees_is_told(k8s: Path, file: str, before: str, after: str, said: str) -> None:
    path = k8s / file
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    with pytest.raises(CheckError, match=said):
        build(path.parent, kustomize())


def test_a_key_that_is_there_twice_is_told_with_its_line(k8s: Path) -> None:
    path = k8s / "base" / "front-door.yaml"
    path.write_text(path.read_text().replace("  type: ClusterIP\n", "  type: ClusterIP\n  type: NodePort\n"))
    (problem,) = file_problems(k8s)
    assert str(problem).endswith("front-door.yaml:8: the key type is there twice")


def test_a_changed_deployment_file_is_told_until_make_k8s_ran(k8s: Path) -> None:
    assert drift(k8s) == []
    path = k8s.parent / "deployments" / "prod.yaml"
    path.write_text(path.read_text().replace("max_ongoing_requests: 512", "max_ongoing_requests: 500"))
    told = drift(k8s)
    # single-gpu has a value of its own there
    assert [Path(each.where).parent.name for each in told] == ["base", "multi-node", "spot"]
    assert "run it, and commit" in told[0].what
    assert len(write(k8s)) == len(told)
    assert drift(k8s) == []
    assert write(k8s) == []


def test_a_hand_that_edits_what_is_generated_is_told(k8s: Path) -> None:
    path = k8s / "base" / "generated.yaml"
    path.write_text(path.read_text().replace("replicas: 2", "replicas: 3"))
    assert [each.where for each in drift(k8s)] == [str(path)]
