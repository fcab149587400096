"""One service for all that is done to it, and the report of what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.report import HEAD
from tests.chaos.stage import Stage, stage
from tests.e2e.service import wait_until


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the report goes besides the terminal."""
    parser.addoption("--chaos-report", type=Path, default=None, help="a file for the table")


@pytest.fixture(scope="module")
def stage_(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("chaos")) as running:
        wait_until(running.all_there, 60, "all Routers and replicas are there")
        running.warm_up()
        yield running
        table = "\n".join([HEAD, *(act.row() for act in running.acts)])
        print(f"\n{table}")
        if target := request.config.getoption("--chaos-report", default=None):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(table + "\n")
