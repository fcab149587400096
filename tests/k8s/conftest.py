"""What the tests of k8s/ share: KubeRay's schema and what kustomize builds. They need kubectl or kustomize."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tools.k8s_check.check import all_problems, with_component
from tools.k8s_check.manifests import build, folders, kustomize
from tools.k8s_check.schemas import KubeRay, find_crd

REPOSITORY = Path(__file__).resolve().parents[2]
ROOT = REPOSITORY / "k8s"
NAMES = [folder.name for folder in folders(ROOT)]
INGRESS = "base-ingress-nginx"

Documents = list[dict[str, Any]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-mutations", action="store_true", help="plant every fault, not 200 of them (minutes)")


@pytest.fixture(scope="session")
def kuberay() -> KubeRay:
    given = os.environ.get("CRDS")
    return KubeRay(find_crd(Path(given) if given else None, REPOSITORY)[0])


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Documents]:
    """What an operator would apply, by the name of the folder; and the base with an ingress."""
    command = kustomize()
    made = {folder.name: build(folder, command) for folder in folders(ROOT)}
    scratch = tmp_path_factory.mktemp("components").resolve()
    made[INGRESS] = build(with_component(ROOT / "base", ROOT / "components" / "ingress-nginx", scratch), command)
    return made


@pytest.fixture
def k8s(tmp_path: Path) -> Path:
    """A copy of k8s/ beside deployments/, to be spoiled."""
    for name in ("k8s", "deployments"):
        shutil.copytree(REPOSITORY / name, tmp_path / name)
    return tmp_path / "k8s"


def found_in(documents: Documents, kuberay: KubeRay) -> str:
    """What the check says, without asking vLLM."""
    return "\n".join(map(str, all_problems(documents, kuberay, engines=False)))
