"""One service for all clients: the real engine, and a scripted model where an answer must be this one and no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import QWEN, RESIDENT, real_models
from tests.e2e.service import Service, running

SCRIPTED = "scripted"
# As Qwen's template has a model call a tool. It says so until a request's last message tells it otherwise.
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    kept: Path = tmp_path_factory.mktemp("batches")
    models = [model for model in real_models() if model["id"] in (RESIDENT, QWEN)]
    for model in models:
        # The shipped level: arguments are held to their schema although few clients ask for `strict`.
        model["engine"] = {name: value for name, value in model["engine"].items() if name != "tool_strict_level"}
    models.append({"id": SCRIPTED, "tier": "resident", "context": 4096, "fake": {"text": CALL}})
    with running(
        models, pool={"memory_gb": 4}, conversations={"enabled": True}, batches={"directory": str(kept)}
    ) as started:
        yield started
