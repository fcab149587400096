"""The Dockerfiles: pinned, without root, and with the versions that the tests run with."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.k8s.conftest import REPOSITORY

DOCKERFILES = sorted((REPOSITORY / "docker").glob("*.Dockerfile"))
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def pins() -> dict[str, str]:
    lines = (REPOSITORY / "docker" / "constraints.txt").read_text().splitlines()
    return {
        canonicalize_name(name): version
        for name, version in (line.split("==") for line in lines if line and not line.startswith("#"))
    }


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_an_image_is_built_on_a_version_and_runs_as_the_user_of_the_pods(file) -> None:  # type: ignore[no-untyped-def]
    text = file.read_text()
    assert re.findall(r"^FROM (\S+)$", text, re.MULTILINE)
    assert all(re.search(r":v?\d+\.\d+\.\d+", base) for base in re.findall(r"^FROM (\S+)$", text, re.MULTILINE))
    assert re.findall(r"^USER (\S+)$", text, re.MULTILINE)[-1] == "1000:1000"
    assert "--uid 1000" in text
    assert "HOME=/home/switchyard" in text
    for copied in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        assert all((REPOSITORY / source).exists() for source in copied.split())


def test_every_direct_requirement_is_pinned_within_its_range() -> None:
    optional = PROJECT["optional-dependencies"]
    required = [Requirement(line) for line in [*PROJECT["dependencies"], *optional["scorer"]]]
    assert {canonicalize_name(each.name) for each in required} == set(pins())
    for each in required:
        assert each.specifier.contains(pins()[canonicalize_name(each.name)]), each


def test_the_images_have_the_vllm_and_the_ray_of_the_project() -> None:
    optional = PROJECT["optional-dependencies"]
    version = Requirement(optional["cuda"][0]).specifier
    base = re.search(
        r"^FROM vllm/vllm-openai:v(\S+)$", (REPOSITORY / "docker/cuda.Dockerfile").read_text(), re.MULTILINE
    )
    assert base
    assert version.contains(base[1])
    assert pins()["ray"] == importlib.metadata.version("ray")
