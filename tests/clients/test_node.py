"""OpenAI's client for Node: `node/openai.test.mjs` against the service."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import QWEN, RESIDENT
from tests.e2e.conversation import COMPACT_CALL
from tests.e2e.service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.real_engine]

SCRIPT = Path(__file__).parent / "node" / "openai.test.mjs"


def test_openai_for_node_gets_what_it_asks_for(service: Service) -> None:
    given = {"BASE_URL": service.base_url, "RESIDENT": RESIDENT, "QWEN": QWEN, "LOGIT_BIAS": json.dumps(COMPACT_CALL)}
    environment = {**os.environ, **given}
    ran = subprocess.run(
        ["node", "--test", "--test-reporter=tap", str(SCRIPT)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "# fail 0" in ran.stdout
    assert "# pass 0" not in ran.stdout
