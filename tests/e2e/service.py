"""Runs the service as users do, by `serve run FILE`, on ports and a Ray of its own."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from serve_app.config import deployment_name, parse_config
from tests.ports import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
MODELS_DIR = Path(os.environ.get("MODELS_DIR") or REPOSITORY / ".models").absolute()
START_DEADLINE_S = 200
POLL_S = 0.1
_LOG_CHARACTERS = 8000
_C = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _told_when_we_die() -> None:
    """Run in a child: as Ctrl-C to pytest ends its workers without their teardown, it hears Ctrl-C itself then."""
    _C.prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


def wait_until(look: Callable[[], Any], deadline_s: float, what: str) -> Any:
    """Poll until `look` returns something true."""
    deadline = time.monotonic() + deadline_s
    while True:
        if found := look():
            return found
        assert time.monotonic() < deadline, f"not within {deadline_s} s: {what}"
        time.sleep(POLL_S)


@contextlib.contextmanager
def meanwhile(look: Callable[[], None], every_s: float) -> Iterator[None]:
    """Look again and again, in a thread of its own, until the end of the block."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(every_s):
            look()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Service:
    """A running service. `models` in the form of a deployment file's.

    It brings a Ray of its own, or runs on the cluster at `address`, reached with `environment`. With a `dashboard`
    it can be told things by Serve's command line, and finds its metrics' addresses; it starts more slowly.
    """

    def __init__(
        self,
        models: list[dict[str, Any]],
        *,
        address: str = "local",
        environment: dict[str, str] | None = None,
        dashboard: bool = False,
        **args: Any,
    ) -> None:
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        # Short: Ray puts sockets below it, and their paths may have 107 characters.
        self.scratch = Path(tempfile.mkdtemp(prefix="sw-", dir="/tmp"))
        # The one of the repository is for what people ask of it.
        args.setdefault("audit", {"directory": str(self.scratch / "audit")})
        args.setdefault("router", {})
        args["router"] = {"port": self.port, "num_cpus": 0.1, "drain_s": 5, **args["router"]}
        args.setdefault("pool", {}).setdefault("resources", {"num_cpus": 0.1})
        for model in models:
            if model.get("tier") == "resident" and "external" not in model:
                model.setdefault("resources", {"num_cpus": 0.1})
        self.serve_port = free_port()
        self._address = address
        self._dashboard = dashboard
        self._environment = environment or {
            "RAY_TMPDIR": str(self.scratch),
            "RAY_AUTH_MODE": "token",
            # Not the one in the home directory: two services that start at once would each write it.
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            # As `up` has it: else whatever starts beside them goes before engines and Routers.
            "RAY_worker_niceness": "0",
        }
        document = {
            # The nodes of a fake cluster share their ports.
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": self.serve_port},
            "applications": [
                {
                    "name": "switchyard",
                    "route_prefix": "/",
                    "import_path": "serve_app.app:build",
                    "args": {"models_dir": str(MODELS_DIR), "models": models, **args},
                }
            ],
        }
        self.file = self.scratch / "deployment.yaml"
        self.file.write_text(yaml.safe_dump(document))
        self.log = self.scratch / "serve.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._family: list[psutil.Process] = []

    def start(self, *, wait: bool = True) -> None:
        environment = {**os.environ, **self._environment, "PYTHONPATH": str(REPOSITORY)}
        if self._address == "local" and not self._dashboard:
            command = [sys.executable, "-m", "tests.e2e.serve_run", str(self.file)]
        else:
            command = [str(Path(sys.executable).parent / "serve"), "run", "--address", self._address, str(self.file)]
        # A child inherits an ignored SIGINT (of a background job, say) and would not hear our Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd=REPOSITORY,
                start_new_session=True,
                preexec_fn=_told_when_we_die,
            )
        self._family = []
        if wait:
            try:
                wait_until(self._started, START_DEADLINE_S, "the service is ready")
            except AssertionError:
                print(self.last_words())
                self.stop()
                raise

    def deploy(self, live: dict[str, Any]) -> None:
        """`serve deploy` of the same file, with this as the `user_config` of every deployment of ours."""
        document = yaml.safe_load(self.file.read_text())
        application = document["applications"][0]
        config = parse_config(application["args"])
        names = ["Router", "LazyPool", *map(deployment_name, config.residents)]
        application["deployments"] = [{"name": name, "user_config": live} for name in names]
        self.file.write_text(yaml.safe_dump(document))
        self.serve("deploy", str(self.file))

    def serve(self, command: str, *arguments: str) -> str:
        """What a command of Serve's own says to this service's cluster, through its dashboard."""
        program = str(Path(sys.executable).parent / "serve")
        environment = {**os.environ, **self._environment, "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(
            [program, command, "--address", self.dashboard(), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def dashboard(self) -> str:
        """Where Ray's is, which it says itself."""
        found = re.search(r"dashboard at \S*?(http://[\d.]+:\d+|[\d.]+:\d+)", self.log.read_text())
        assert found, "Ray says where its dashboard is"
        return found[1] if "://" in found[1] else f"http://{found[1]}"

    def _started(self) -> bool:
        assert self._process
        assert self._process.poll() is None, "serve run ended"
        return self.ready()

    def interrupt(self) -> None:
        """As Ctrl-C does."""
        assert self._process
        leader = psutil.Process(self._process.pid)
        self._family = [leader, *leader.children(recursive=True)]
        self._process.send_signal(signal.SIGINT)

    def stop(self) -> list[psutil.Process]:
        """End it, and remove its files; returns what is still there afterwards (and ends that, too)."""
        left = self.end()
        shutil.rmtree(self.scratch, ignore_errors=True)
        return left

    def restart(self) -> None:
        """End it and give the same command again."""
        left = self.end()
        assert not left, f"processes left behind: {left}"
        self.start()

    def end(self) -> list[psutil.Process]:
        """As Ctrl-C does, after which it may be started again; returns what had to be killed."""
        assert self._process
        if not self._family:
            self.interrupt()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=60)
        _, left = psutil.wait_procs(self._family, timeout=10)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return left

    def last_words(self) -> str:
        """The end of what the service logged."""
        return self.log.read_text(errors="replace")[-_LOG_CHARACTERS:] if self.log.exists() else ""

    def request(
        self,
        path: str,
        body: object = None,
        *,
        method: str | None = None,
        headers: dict[str, str] | None = None,
        data: bytes | None = None,
        timeout_s: float = 60,
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers and parsed JSON (or text) of one request."""
        raw = data if data is not None else json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(
            self.base_url + path,
            data=raw,
            method=method,
            headers={"content-type": "application/json", **(headers or {})},
        )
        try:
            answer = _direct.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            text = answer.read().decode()
            with contextlib.suppress(ValueError):
                text = json.loads(text)
            return answer.status, {name.lower(): value for name, value in answer.headers.items()}, text

    def ready(self) -> bool:
        try:
            return self.request("/ready", timeout_s=5)[0] == 200
        except OSError:
            return False

    def model(self, model_id: str) -> dict[str, Any]:
        """The model's card in /v1/models."""
        status, _, body = self.request(f"/v1/models/{model_id}")
        assert status == 200
        return dict(body)

    def metrics(self) -> str:
        """All pages that Ray's dashboard tells Prometheus to scrape, one after the other."""
        pages = []
        for file in self.scratch.rglob("prom_metrics_service_discovery.json"):
            for target in json.loads(file.read_text())[0]["targets"]:
                with contextlib.suppress(OSError), _direct.open(f"http://{target}/metrics", timeout=5) as answer:
                    pages.append(answer.read().decode())
        return "\n".join(pages)

    def in_state(self, model_id: str, state: str, deadline_s: float = 60) -> dict[str, Any]:
        """Wait until the model is in this state."""
        return wait_until(
            lambda: (card := self.model(model_id))["state"] == state and card,
            deadline_s,
            f"{model_id} is {state}",
        )

    def unload(self, model_id: str) -> dict[str, Any]:
        """Have a lazy model that nobody uses unloaded, and wait for that."""
        self.request(f"/v1/router/models/{model_id}/unload", {}, method="POST")
        return self.in_state(model_id, "stopped")

    def engine_processes(self, deployment: str) -> list[psutil.Process]:
        """The engine hosts of a deployment's replicas, parents before children."""
        assert self._process
        found = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if f":{deployment}" in " ".join(process.cmdline()):
                    found += [child for child in process.children() if "serve_app.engines.host" in child.cmdline()]
        return found


@contextlib.contextmanager
def running(models: list[dict[str, Any]], **args: Any) -> Iterator[Service]:
    """A service that is ready; nothing of it is left afterwards."""
    service = Service(models, **args)
    service.start()
    try:
        yield service
    except BaseException:
        print(service.last_words())
        raise
    finally:
        left = service.stop()
    assert not left, f"processes left behind: {left}"
