"""`python -m serve_app up`, which is what `make run` ends in: clear words when it cannot, and nothing left behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.e2e.conftest import fake_models
from tests.e2e.service import MODELS_DIR, REPOSITORY, Service, wait_until
from tests.ports import free_port

pytestmark = pytest.mark.e2e
COMMAND = [sys.executable, "-m", "serve_app", "up"]


def deployment(tmp_path: Path, model: dict[str, Any], **args: Any) -> tuple[Path, int]:
    """A deployment file with one resident model on free ports, and the port of its API."""
    port = free_port()
    router = {"port": port, "num_cpus": 0.1, "drain_s": 2}
    application = {
        "name": "switchyard",
        "route_prefix": "/",
        "import_path": "serve_app.app:build",
        "args": {"router": router, "audit": {"directory": str(tmp_path / "audit")}, "models": [model], **args},
    }
    file = tmp_path / "deployment.yaml"
    file.write_text(
        yaml.safe_dump({"http_options": {"host": "127.0.0.1", "port": free_port()}, "applications": [application]})
    )
    return file, port


def fake_model(**more: Any) -> dict[str, Any]:
    return {**fake_models()[0], "replicas": 1, "resources": {"num_cpus": 0.1}, **more}


def smollm2(**more: Any) -> dict[str, Any]:
    return {
        "id": "m",
        "tier": "resident",
        "source": "smollm2-135m-instruct",
        "context": 512,
        "resources": {"num_cpus": 0.1},
        **more,
    }


def refusal(*arguments: str | Path) -> str:
    """What `up` says when it refuses to start; it must end by itself, unhappily and without a traceback."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, cwd=REPOSITORY, timeout=120, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "Traceback" not in said
    return said


@contextlib.contextmanager
def listener() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_a_taken_port_is_named_with_its_holder_and_a_remedy(tmp_path: Path) -> None:
    file, _ = deployment(tmp_path, fake_model())
    with listener() as port:
        said = refusal(file, "--port", str(port))
    assert f"port {port} on 127.0.0.1 is not free" in said
    assert str(os.getpid()) in said
    assert "make run PORT=" in said


def test_a_missing_model_says_where_it_was_looked_for_and_how_to_get_it(tmp_path: Path) -> None:
    file, _ = deployment(tmp_path, smollm2(), models_dir=str(tmp_path / "models"))
    (tmp_path / "models" / "smollm2-135m-instruct").mkdir(parents=True)
    said = refusal(file)
    assert "m: " in said
    assert "make models" in said
    shutil.rmtree(tmp_path / "models")
    file, _ = deployment(tmp_path, smollm2(source="./nowhere"))
    assert "there is no model in" in refusal(file)


def test_a_half_copied_model_is_not_started(tmp_path: Path) -> None:
    target = tmp_path / "models" / "smollm2-135m-instruct"
    shutil.copytree(MODELS_DIR / "smollm2-135m-instruct", target)
    weights = target / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    deployed, _ = deployment(tmp_path, smollm2(), models_dir=str(tmp_path / "models"))
    said = refusal(deployed)
    assert "model.safetensors" in said
    assert "make models" in said


def test_too_little_memory_says_how_much_is_needed(tmp_path: Path) -> None:
    file, _ = deployment(tmp_path, smollm2(memory_gb=100_000), models_dir=str(MODELS_DIR))
    said = refusal(file)
    assert "too little memory" in said
    assert "100002.0 GB" in said


def test_a_wrong_key_is_named_by_its_path(tmp_path: Path) -> None:
    file, _ = deployment(tmp_path, fake_model(contxt=3))
    assert "models[0].contxt: no such key" in refusal(file)
    file.write_text("{")
    assert "not valid YAML" in refusal(file)
    assert "no such file" in refusal(tmp_path / "none.yaml")


def test_an_engine_that_cannot_start_is_said_in_one_line_and_everything_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _ = deployment(tmp_path, fake_model(fake={"fail_load": "the weights are not readable"}))
    monkeypatch.setenv("SWITCHYARD_TEST_MARK", str(tmp_path))
    said = refusal(file)
    assert "hot could not start: RuntimeError: the weights are not readable" in said
    assert not [process for process in psutil.process_iter() if _mark(process) == str(tmp_path)]


def _mark(process: psutil.Process) -> str | None:
    with contextlib.suppress(psutil.Error):
        return process.environ().get("SWITCHYARD_TEST_MARK") if process.pid != os.getpid() else None
    return None


def streamed(base_url: str, script: str) -> http.client.HTTPResponse:
    """An answer that has begun."""
    body = {"messages": [{"role": "user", "content": f"fake[{script}]"}], "stream": True}
    connection = http.client.HTTPConnection(base_url.removeprefix("http://"), timeout=30)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    return answer


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_in_the_url_and_a_curl_and_stops_without_a_trace(tmp_path: Path, end: signal.Signals) -> None:
    file, port = deployment(tmp_path, fake_model())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    running = subprocess.Popen(
        [*COMMAND, str(file)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY
    )
    said: list[str] = []
    assert running.stdout
    reader = threading.Thread(target=lambda: said.extend(running.stdout or ()))
    reader.start()
    try:
        wait_until(lambda: any("is ready at" in line for line in said), 90, "up says that it is ready")
        assert f"http://127.0.0.1:{port}" in said[-1]
        service = Service.__new__(Service)
        service.base_url = f"http://127.0.0.1:{port}"
        curl = next(line for line in said if "curl " in line)
        body = json.loads(curl.split("-d ")[1].strip().strip("'"))
        assert service.request("/v1/chat/completions", body)[0] == 200
        family = psutil.Process(running.pid).children(recursive=True)
        assert family
        # SIGTERM is what `docker stop` sends; a stream ends well within the drain.
        stream = streamed(service.base_url, "tokens=40,tpot_s=0.03")
    finally:
        running.send_signal(end)
        running.wait(60)
        reader.join()
    assert running.returncode == 0
    rest = stream.read()
    assert b"t039" in rest
    assert rest.rstrip().endswith(b"data: [DONE]")
    _, left = psutil.wait_procs(family, timeout=5)
    assert not left
