"""The operator's page names what there is, and only that."""

from __future__ import annotations

import re

import pytest

from tests.k8s.conftest import REPOSITORY, ROOT
from tools.k8s_check.references import SECRETS

PAGE = (REPOSITORY / "docs" / "kubernetes.md").read_text()


@pytest.mark.parametrize("name", sorted(SECRETS))
def test_every_secret_that_a_pod_needs_is_told_of(name: str) -> None:
    assert name in PAGE


def test_every_overlay_and_component_is_in_the_table_and_no_other() -> None:
    there = {f"{kind}/{path.name}" for kind in ("overlays", "components") for path in (ROOT / kind).iterdir()}
    assert set(re.findall(r"^\| `((?:overlays|components)/[\w-]+)`", PAGE, re.MULTILINE)) == there
