"""A server that is not ours behind `serve run`: answered from, missed when it is gone, and found when it is back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI

from tests.e2e.service import REPOSITORY, Service, running, wait_until
from tests.ports import free_port

pytestmark = pytest.mark.e2e
WORDS = "t000 t001 t002 t003"
ASKED = [{"role": "user", "content": "fake[tokens=4]"}]


class TheirServer:
    """An OpenAI-compatible server of somebody else's, which comes and goes."""

    def __init__(self) -> None:
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "benchmarks.instant_engine", "--port", str(self.port)]
        self._process = subprocess.Popen(command, cwd=REPOSITORY)

    def stop(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="module")
def theirs() -> Iterator[TheirServer]:
    server = TheirServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def service(theirs: TheirServer) -> Iterator[Service]:
    external = {"urls": [f"http://127.0.0.1:{theirs.port}/v1"], "model": "instant", "health_every_s": 0.2}
    model = {"id": "theirs", "tier": "resident", "context": 4096, "queue": {"size": 0}, "external": external}
    with running([model]) as service:
        yield service


def test_it_answers_through_the_front_door_and_its_absence_is_said(service: Service, theirs: TheirServer) -> None:
    client = OpenAI(base_url=service.base_url + "/v1", api_key="none", max_retries=0, timeout=30)
    whole = client.chat.completions.create(model="auto", messages=ASKED)
    assert whole.choices[0].message.content == WORDS
    chunks = client.chat.completions.create(model="theirs", messages=ASKED, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == WORDS

    theirs.stop()
    wait_until(lambda: not service.ready(), 10, "the router says that it is not ready")
    with pytest.raises(openai.InternalServerError) as gone:
        client.chat.completions.create(model="theirs", messages=ASKED)
    assert (gone.value.status_code, gone.value.code) == (503, "upstream_unreachable")
    assert service.model("theirs")["failure"] == "it does not answer"

    theirs.start()
    wait_until(service.ready, 10, "the router is ready again")
    assert client.chat.completions.create(model="theirs", messages=ASKED).choices[0].message.content == WORDS
