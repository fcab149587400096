"""`serve deploy` with another `user_config`, while clients stream and ask: what changes, and that nobody notices."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
import yaml

from tests.e2e.service import REPOSITORY, Service, running, wait_until

pytestmark = pytest.mark.e2e
CHAT = "/v1/chat/completions"
CLIENTS = 6
HEARD_WITHIN_S = 30


def key_of(name: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "sha256": hashlib.sha256(f"{name}-key".encode()).hexdigest(), **more}


STEADY = key_of("steady", admin=True)


def as_(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}-key"}


def resident(name: str) -> dict[str, Any]:
    return {"id": name, "tier": "resident", "context": 4096, "fake": {"tpot_s": 0.01, "tokens": 40}}


COLD = {"id": "cold", "tier": "lazy", "context": 4096, "fake": {"tpot_s": 0.1, "tokens": 250, "load_s": 0.2}}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running(
        [resident("hot"), resident("other")],
        dashboard=True,
        pool={"standby": False, "memory_gb": 4},
        security={"keys": [STEADY, key_of("second")]},
    ) as service:
        yield service


class Load:
    """Clients that stream and ask without a pause, in a thread of their own; `failed` says what they met."""

    def __init__(self, base_url: str) -> None:
        self._url = base_url + CHAT
        self.answered = 0
        self.failed: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def _run(self) -> None:
        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(self._client(session, stream=bool(index % 2)) for index in range(CLIENTS)))

    async def _client(self, session: aiohttp.ClientSession, *, stream: bool) -> None:
        while not self._over.is_set():
            body = {"model": "hot", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
            try:
                async with session.post(self._url, json=body, headers=as_("steady")) as answer:
                    text = await answer.text()
                    whole = text.rstrip().endswith("data: [DONE]") if stream else '"finish_reason":' in text
                    if answer.status != 200 or not whole or '"error"' in text:
                        self.failed.append(f"{answer.status}: {text[-200:]}")
                    self.answered += 1
            except (aiohttp.ClientError, TimeoutError) as error:
                self.failed.append(repr(error))

    @contextlib.contextmanager
    def under_way(self) -> Iterator[Load]:
        self._thread.start()
        try:
            wait_until(lambda: self.answered >= CLIENTS, 30, "the clients are served")
            yield self
        finally:
            self._over.set()
            self._thread.join()


def test_live_changes_drop_no_request_and_restart_no_engine(service: Service) -> None:
    def ask(model: str, content: str = "hi", key: str = "steady", **more: Any) -> tuple[int, dict[str, str], Any]:
        body = {"model": model, "messages": [{"role": "user", "content": content}], **more}
        return service.request(CHAT, body, headers=as_(key))

    def config() -> dict[str, Any]:
        return dict(service.request("/ready", headers=as_("steady"))[2]["config"])

    def deploy(live: dict[str, Any]) -> None:
        before = config()["policy"]
        service.deploy(live)
        wait_until(lambda: config()["policy"] != before, HEARD_WITHIN_S, "the Router has heard")

    def engines() -> dict[str, list[int]]:
        found = {name: service.engine_processes(f"Resident-{name}") for name in ("hot", "other")}
        return {name: [process.pid for process in processes] for name, processes in found.items()}

    first = engines()
    assert all(first.values())
    live: dict[str, Any] = {}
    with Load(service.base_url).under_way() as load:
        # A rule.
        assert "x-router-rule" not in ask("auto", "a poem")[1]
        live["routing"] = {"rules": [{"name": "poems", "when": {"text": ["poem"]}, "then": {"model": "other"}}]}
        deploy(live)
        assert ask("auto", "a poem")[1]["x-router-rule"] == "poems"
        # A key, and another one gone.
        live["security"] = {"keys": [STEADY, key_of("third")]}
        deploy(live)
        assert (ask("hot", key="third")[0], ask("hot", key="second")[0]) == (200, 401)
        # Limits, of a key and of a model.
        live["security"] = {"keys": [STEADY, key_of("third", requests_per_minute=1)]}
        live["models"] = [{"id": "other", "max_prompt_tokens": 40}]
        deploy(live)
        assert [ask("hot", key="third")[0] for _ in range(2)] == [200, 429]
        assert (ask("other")[0], ask("other", "seven " * 100)[0]) == (200, 400)
        # A lazy model comes.
        assert ask("cold")[0] == 404
        live["models"].append(COLD)
        deploy(live)
        assert ask("cold", max_tokens=1)[0] == 200
        # And goes, with a request of it under way, which takes longer than the pool waits.
        answers: list[int] = []
        slow = threading.Thread(target=lambda: answers.append(ask("cold")[0]))
        slow.start()
        wait_until(
            lambda: service.request("/v1/models/cold", headers=as_("steady"))[2]["in_flight"], 10, "it is under way"
        )
        live["models"].pop()
        deploy(live)
        assert ask("cold")[0] == 404
        assert not answers, "the request was still under way"
        slow.join()
        assert answers == [200]
        wait_until(lambda: not service.engine_processes("LazyPool"), 30, "its engine has gone")
        # What is wrong is refused as a whole.
        good = config()["policy"]
        service.deploy({**live, "router": {"hold_s": -1}, "security": {"keys": [key_of("second")]}})
        refused = wait_until(lambda: config()["refused"], HEARD_WITHIN_S, "the Router refuses it")
        assert refused.startswith("user_config.router.hold_s: ")
        assert config()["policy"] == good
        assert ask("hot", key="second")[0] == 401
        assert "user_config.router.hold_s: " in service.log.read_text()
        assert engines() == first
        # An argument of an engine.
        live["models"].append({"id": "other", "max_prompt_tokens": 40, "fake": {"tokens": 2}})
        del live["models"][0]
        deploy(live)
        wait_until(lambda: engines()["other"] not in ([], first["other"]), 30, "the engine starts anew")
        wait_until(lambda: ask("other")[0] == 200, 30, "it answers")
        assert ask("other")[2]["usage"]["completion_tokens"] == 2
        assert engines()["hot"] == first["hot"]
    assert load.failed == []
    assert load.answered > CLIENTS


@pytest.mark.case(143)
def test_deployed_twice_in_a_row_it_runs_and_all_say_so(service: Service) -> None:
    live = {"router": {"hold_s": 77}}
    service.deploy(live)
    service.deploy(live)

    def status() -> str:
        return str(yaml.safe_load(service.serve("status"))["applications"]["switchyard"]["status"])

    wait_until(lambda: status() == "RUNNING", 60, "Serve says that it runs")
    ready = service.request("/ready", headers=as_("steady"))
    assert (ready[0], ready[2]["ready"], ready[2]["config"]["refused"]) == (200, True, None)
    body = {"model": "hot", "messages": [{"role": "user", "content": "hi"}]}
    assert service.request(CHAT, body, headers=as_("steady"))[0] == 200


def test_status_shows_what_runs(service: Service) -> None:
    command = [sys.executable, "-m", "serve_app", "status", "--url", service.base_url]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "SWITCHYARD_KEY": "steady-key"}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert "hot" in shown.stdout
    found = json.loads(subprocess.check_output([*command, "--json"], env=environment, timeout=60))
    assert {model["id"]: model["state"] for model in found["models"]}["hot"] == "awake"
    (node,) = found["nodes"]
    assert [replica["node"] for replica in found["replicas"]["hot"]] == [node["id"]]
    assert f"nodes: {node['name']}" in shown.stdout
    refused = subprocess.run(
        command, env={**environment, "SWITCHYARD_KEY": "no-key"}, capture_output=True, text=True, timeout=60
    )
    assert (refused.returncode, "401" in refused.stderr) == (1, True)
