"""`python -m serve_app up`: `serve run` for a person at a terminal.

Looks first whether it can work (port, memory, model files), then runs `serve run` on a Ray of its own, says
what it waits for, ends in the URL, and leaves no process behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml
from rich.console import Console

from serve_app.check import DeploymentFile
from serve_app.config import Config
from serve_app.fetch import MODELS, verify
from serve_app.model_schema import REPOSITORY, Model, resolve_dir

_PR_SET_CHILD_SUBREAPER = 36
# Ray's head, its dashboard, Serve's controller and proxy and our replicas: measured 2.0 GB on two cores.
_OVERHEAD_GB = 2.0
_GB = 1e9
_POLL_S = 0.25
# Past any proxy that the environment names: it would look for our address on its own machine.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# Serve gets the drain time and this long; then what is left is killed.
_STOP_MARGIN_S = 30.0
_KILL_WAIT_S = 5.0
# What our own processes raise for a person to read; the rest of Ray's log stays in the file.
_FATAL = re.compile(r"serve_app\.[\w.]*(?:EngineError|PortTaken|ConfigError): (.+)")
# Serve's words for a replica that no node has room for.
_UNPLACED = re.compile(
    r"(Deployment '[^']+') in application '[^']+' has \d+ replicas that have taken more than .*"
    r"Resources required for each replica: (.+?), total resources available: (.+?)\. Use"
)
_NOTICE = re.compile(r"(?:ERROR|WARNING) serve_app[\w.]*: (.+)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class LaunchError(Exception):
    """The service cannot start. The message says what is wrong and what to do."""


def with_overrides(
    file: DeploymentFile, *, port: int | None, models_dir: str | None, log_level: str | None
) -> DeploymentFile:
    """The same deployment with what the command line says instead. Raises `ConfigError`."""
    from serve_app.check import IMPORT_PATH, effective

    raw = json.loads(json.dumps(file.raw))
    args = next(app for app in raw["applications"] if app["import_path"] == IMPORT_PATH)["args"]
    if port:
        args.setdefault("router", {})["port"] = port
        http = raw.setdefault("http_options", {})
        http["port"] = port + 1
    if models_dir:
        args["models_dir"] = str(Path(models_dir).expanduser().absolute())
    if log_level:
        args["log_level"] = log_level
    return DeploymentFile(file.path, raw, effective(raw))


def up(file: DeploymentFile, console: Console) -> int:
    """Serve until Ctrl-C. Returns the exit status. Raises `LaunchError` if it cannot start."""
    config = file.config
    serve_port = int((file.raw.get("http_options") or {}).get("port", 8000))
    _check_ports(config, serve_port)
    _check_models(config)
    _check_memory(config, console)
    log_path = REPOSITORY / "run" / f"switchyard-{config.router.port}.log"
    log_path.parent.mkdir(exist_ok=True)
    console.print(f"Switchyard: {_short(file.path)}, log in {_short(log_path)}", highlight=False)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with _stop_signals() as stopping, tempfile.TemporaryDirectory(prefix="switchyard-") as scratch:
        target = Path(scratch) / file.path.name
        target.write_text(yaml.safe_dump(file.raw, sort_keys=False))
        with log_path.open("wb") as log:
            child = _serve_run(target, log)
        try:
            return _watch(config, child, log_path, stopping, console)
        finally:
            _stop(child, config.router.leave_s + config.router.drain_s, stopping, console)


def _short(path: Path) -> str:
    with contextlib.suppress(ValueError):
        return str(path.resolve().relative_to(Path.cwd()))
    return str(path)


def _check_ports(config: Config, serve_port: int) -> None:
    where = f"router.port, or `make run PORT={config.router.port + 100}`"
    for host, port, remedy in (
        (config.router.host, config.router.port, where),
        ("127.0.0.1", serve_port, "http_options.port"),
    ):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise LaunchError(
                    f"port {port} on {host} is not free ({error.strerror}).{_holder(port)}"
                    f" Stop what uses it, or choose another port: {remedy}."
                ) from None


def _holder(port: int) -> str:
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == "LISTEN":
                name = psutil.Process(connection.pid).name() if connection.pid else "another user's process"
                return f" It is used by {name} (process {connection.pid})."
    return ""


def _check_models(config: Config) -> None:
    for model in config.models:
        if model.fake or model.external:
            continue
        path = Path(model.path(config.models_dir))
        if not path.is_absolute():
            continue  # a hub id
        fetched = path.name in MODELS and path.parent == resolve_dir(config.models_dir)
        remedy = f"`make models MODELS_DIR={config.models_dir}` fetches it" if fetched else "check its `source`"
        if not path.is_dir():
            raise LaunchError(f"{model.id}: there is no model in {path}; {remedy}.")
        if fetched and (found := verify(path)):
            raise LaunchError(f"{model.id}: its files are not whole ({found[0]}); {remedy} again.")
        if not (path / "config.json").is_file():
            raise LaunchError(f"{model.id}: {path} holds no config.json, so it is not a model; {remedy}.")


def _check_memory(config: Config, console: Console) -> None:
    """Only what runs on CPUs: GPU memory is the engines' to check."""
    free_gb = psutil.virtual_memory().available / _GB
    residents = sum(model.memory_gb * model.least_replicas for model in config.residents if not _on_gpu(model))
    needed_gb = residents + _OVERHEAD_GB
    if free_gb < needed_gb:
        raise LaunchError(
            f"too little memory: {free_gb:.1f} GB are free, the resident models and Ray need about"
            f" {needed_gb:.1f} GB. Close something, or configure a smaller model."
        )
    if config.pool.resources.num_gpus:
        return
    largest = max((model.memory_gb for model in config.lazy), default=0.0)
    if free_gb < needed_gb + largest:
        console.print(
            f"Little memory: {free_gb:.1f} GB are free; the largest lazy model needs {largest:.1f} GB"
            f" beside the {needed_gb:.1f} GB of the resident ones, and may not load."
        )


def _on_gpu(model: Model) -> bool:
    return bool(model.fake or model.external) or model.resources.num_gpus > 0


def _serve_run(target: Path, log: Any) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).parent / "serve"), "run", "--address", "local", str(target)]
    # Token authentication is Ray's default from 2.60 on; said here, Ray does not warn about it.
    # Workers run at niceness 15 otherwise, and every other program on the machine goes first.
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_worker_niceness": "0",
        **os.environ,
        "PYTHONUNBUFFERED": "1",
    }
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    # Of its own session, so that a Ctrl-C in the terminal comes to us alone and is passed on once.
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
    )


class _Stopping:
    """How often we were told to stop."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, signum: int, frame: object) -> None:
        self.count += 1


@contextlib.contextmanager
def _stop_signals() -> Iterator[_Stopping]:
    stopping = _Stopping()
    before = {number: signal.signal(number, stopping) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(
    config: Config, child: subprocess.Popen[bytes], log_path: Path, stopping: _Stopping, console: Console
) -> int:
    """Say how it goes until it is ready, then wait for the end."""
    began = time.monotonic()
    ready = False
    with log_path.open("rb") as log, console.status("starting Ray", spinner="dots") as status:
        while not stopping.count:
            for line in _new_lines(log):
                if not ready and (fatal := _FATAL.search(line)):
                    raise LaunchError(f"{fatal[1].strip()}\nThe whole log: {_short(log_path)}")
                if notice := _NOTICE.search(line):
                    console.print(notice[1], highlight=False, markup=False)
                if not ready and (waits := _UNPLACED.search(line)):
                    console.print(
                        f"{waits[1]} waits for room: a replica needs {waits[2]}, there is {waits[3]}.",
                        highlight=False,
                        markup=False,
                    )
            if child.poll() is not None:
                raise LaunchError(
                    f"`serve run` ended with status {child.returncode}. Its last words:\n{_last_words(log_path)}"
                )
            if not ready:
                state = _readiness(config)
                ready = state.get("ready", False)
                status.update(_waiting_for(state, time.monotonic() - began))
                if ready:
                    status.stop()
                    _say_ready(config, time.monotonic() - began, console)
            time.sleep(_POLL_S)
    return 0


def _new_lines(log: Any) -> Iterator[str]:
    for line in log:
        yield _COLOUR.sub("", line.decode(errors="replace"))


def _last_words(log_path: Path) -> str:
    lines = [line for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(_COLOUR.sub("", line) for line in lines[-5:])


def _url(config: Config) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.router.host, config.router.host)
    return f"http://{host}:{config.router.port}"


def _readiness(config: Config) -> dict[str, Any]:
    try:
        with _direct.open(_url(config) + "/ready", timeout=3) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        with contextlib.suppress(ValueError):
            return dict(json.load(error))
    except (OSError, ValueError):
        pass
    return {}


def _waiting_for(state: dict[str, Any], elapsed_s: float) -> str:
    loading = [model for model, stage in state.get("models", {}).items() if stage == "loading"]
    what = f"loading {', '.join(loading)}" if loading else "starting Ray"
    return f"{what} ({elapsed_s:.0f} s)"


def _say_ready(config: Config, took_s: float, console: Console) -> None:
    question = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    curl = (
        f"curl {_url(config)}/v1/chat/completions -H 'content-type: application/json'"
        f" -d {shlex.quote(json.dumps(question))}"
    )
    names = ", ".join(model.id for model in config.residents)
    lazy = ", ".join(model.id for model in config.lazy)
    console.print(
        f"Ready after {took_s:.0f} s. Hot: {names}." + (f" On demand: {lazy}." if lazy else ""),
        highlight=False,
    )
    console.print(f"Try it:\n  {curl}", highlight=False, soft_wrap=True)
    if config.ui.enabled:
        console.print(f"Or look at it: {_url(config)}/ui", highlight=False, soft_wrap=True)
    console.print(f"Switchyard is ready at {_url(config)} (Ctrl-C stops it)", highlight=False, soft_wrap=True)


def _stop(child: subprocess.Popen[bytes], stop_s: float, stopping: _Stopping, console: Console) -> None:
    """End everything that was started: first as Serve does it, then by force. A second Ctrl-C is for force."""
    told = stopping.count
    if child.poll() is None:
        console.print("Stopping; running answers are finished first. Ctrl-C again ends them.", highlight=False)
        child.send_signal(signal.SIGINT)
        deadline = time.monotonic() + stop_s + _STOP_MARGIN_S
        while child.poll() is None and time.monotonic() < deadline and stopping.count == told:
            time.sleep(_POLL_S)
    # We are their subreaper: whatever Ray or an engine left behind is a descendant of ours.
    left = psutil.Process().children(recursive=True)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=_KILL_WAIT_S)
    console.print("Stopped.", highlight=False)
