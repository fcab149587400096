"""The engine host: a child process that runs one engine behind its own HTTP port.

Started by `process.EngineProcess` as `python -m serve_app.engines.host KIND`. It imports the engine first
(a *standby host* stops there and waits), then obeys one JSON command a line on stdin and reports one JSON
event a line on what was its stdout:

    commands  start {spec, address, secret} · close_if_idle {number} · close {number}
              sleep {number, level} · wake {number} · stop
    events    standby · phase {phase} · ready · failed {message} · done {number, ok, in_flight, served, message}
              activity {in_flight, served, tokens, load} (every second at least)

End of file on stdin means that the supervisor is gone: the whole process group ends at once, so that no
engine outlives its replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import gc
import importlib
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, cast

import orjson
import uvicorn
import uvloop

from serve_app.engines.base import Address, EngineKind, EngineLoad, EngineSpec, Phase, Runtime, ServedApp
from serve_app.engines.gate import Gate
from serve_app.engines.stall import StallWatch, Verdict

_PR_SET_PDEATHSIG = 1
_REPORT_EVERY_S = 0.2
# Said even if nothing has changed: a host that is silent for long hangs.
HEARTBEAT_S = 1.0
# A dead engine fails its requests by itself; the host stays this long for their errors to reach the clients.
_DEATH_GRACE_S = 1.0
# Longer than the Router keeps an idle connection, so that the Router's side closes first.
_KEEP_ALIVE_S = 600


class Events:
    """Writes events, one JSON object a line, to the pipe that the supervisor reads."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def send(self, event: str, **fields: Any) -> None:
        try:
            os.write(self._fd, orjson.dumps({"event": event, **fields}) + b"\n")
        except BrokenPipeError:
            end_process_group()


class Commands(threading.Thread):
    """Reads commands from stdin in a thread of its own, so that end of file is seen even while a load blocks.

    It reads the bare descriptor: a lock of Python's buffered stdin held here would be copied, locked for
    ever, into the engine core that vLLM forks from this process.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True, name="commands")
        self._early: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._sink: Callable[[dict[str, Any]], None] = self._early.put

    def first(self) -> dict[str, Any]:
        """Block until a command comes."""
        return self._early.get()

    def deliver_to(self, sink: Callable[[dict[str, Any]], None]) -> None:
        """From now on call `sink` (from this thread) with each command."""
        self._sink = sink
        while not self._early.empty():
            sink(self._early.get())

    def run(self) -> None:
        pending = b""
        while data := os.read(0, 65536):
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                self._sink(orjson.loads(line))
        end_process_group()


def end_process_group() -> None:
    """Kill this process and every process it started."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _take_ordinary_priority() -> None:
    """Ray runs its workers at niceness 15, and we are a worker's child; as root we may undo it."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def load_runtime(kind: EngineKind) -> Runtime:
    """The module that runs engines of this kind. Imported here only, so a fake engine never imports vLLM."""
    module = importlib.import_module({"vllm": "serve_app.engines.vllm", "fake": "serve_app.engines.fake"}[kind])
    return cast(Runtime, module)


async def run(command: dict[str, Any], runtime: Runtime, commands: Commands, events: Events) -> None:
    """Start the engine of one `start` command and serve it until told to stop, or until it dies."""
    spec = EngineSpec(**command["spec"])

    def report(phase: Phase) -> None:
        events.send("phase", phase=phase.value)

    async with runtime.serve(spec, report) as served:
        gate = Gate(
            served.app,
            max_ongoing=spec.max_ongoing,
            secret=command["secret"],
            load=served.load,
            kv_cache_limit=spec.kv_cache_limit,
        )
        server = _listen(gate, Address(**command["address"]))
        served.attach_server(server.server)
        serving = asyncio.create_task(server.run())
        stop = asyncio.Event()
        _obey(commands, gate, events, stop, served)
        await server.started()
        # Start-up objects live as long as the engine: leave them out of every later collection.
        gc.collect()
        gc.freeze()
        events.send("ready")
        await _watch(served, gate, events, stop, serving, spec.stall_timeout_s)
        server.server.should_exit = True
        await serving


class _Listener:
    def __init__(self, server: uvicorn.Server, sock: socket.socket) -> None:
        self.server, self._sock = server, sock

    async def run(self) -> None:
        await self.server.serve(sockets=[self._sock])

    async def started(self) -> None:
        while not self.server.started:  # noqa: ASYNC110 # uvicorn has no event for it
            await asyncio.sleep(0.005)


class _QuietServer(uvicorn.Server):
    """A server that leaves signals alone: only the supervisor ends a host."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(app: Gate, address: Address) -> _Listener:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # The replica reserves the port with a bound socket that never listens; this one shares it.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind((address.host, address.port))
    config = uvicorn.Config(
        app,
        http="httptools",
        loop="uvloop",
        ws="none",
        lifespan="on",
        access_log=False,
        log_level="warning",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=5,
        server_header=False,
        date_header=False,
    )
    return _Listener(_QuietServer(config), sock)


def _obey(commands: Commands, gate: Gate, events: Events, stop: asyncio.Event, served: ServedApp) -> None:
    loop = asyncio.get_running_loop()
    steering: set[asyncio.Task[None]] = set()

    def done(command: dict[str, Any], ok: bool, message: str = "") -> None:
        counts = {"in_flight": gate.in_flight, "served": gate.served}
        events.send("done", number=command["number"], ok=ok, message=message, **counts)

    async def steer(command: dict[str, Any]) -> None:
        try:
            if command["cmd"] == "sleep":
                await served.sleep(command["level"])
            else:
                await served.wake()
                gate.open()
        except Exception as error:
            traceback.print_exc()
            done(command, ok=False, message=f"{type(error).__name__}: {error}")
        else:
            done(command, ok=True)

    def on_loop(command: dict[str, Any]) -> None:
        match command["cmd"]:
            case "close_if_idle":
                done(command, gate.close_if_idle())
            case "close":
                gate.close()
                done(command, ok=True)
            case "sleep" | "wake":
                task = asyncio.create_task(steer(command))
                steering.add(task)
                task.add_done_callback(steering.discard)
            case "stop":
                gate.close()
                stop.set()

    def from_thread(command: dict[str, Any]) -> None:
        loop.call_soon_threadsafe(on_loop, command)

    commands.deliver_to(from_thread)


async def _watch(
    served: ServedApp,
    gate: Gate,
    events: Events,
    stop: asyncio.Event,
    serving: asyncio.Task[None],
    stall_timeout_s: float | None,
) -> None:
    """Report what is served, and the engine's death or hang; return when it is time to go."""
    reported, reported_at = (0, 0, EngineLoad()), time.monotonic()
    stall, probing = StallWatch(stall_timeout_s, time.monotonic()), None
    while not stop.is_set() and not serving.done():
        now = time.monotonic()
        activity = (gate.in_flight, gate.served, served.load())
        if activity != reported or now - reported_at >= HEARTBEAT_S:
            reported, reported_at = activity, now
            load = dataclasses.asdict(activity[2])
            events.send(
                "activity", in_flight=gate.in_flight, served=gate.served, tokens=gate.in_flight_tokens, load=load
            )
        verdict = stall.look(gate.in_flight, served.steps(), now)
        if verdict is Verdict.ASK and (probing is None or probing.done()):
            probing = asyncio.ensure_future(served.probe())
        if verdict is Verdict.HUNG:
            events.send("failed", message=f"it hung: {gate.in_flight} requests and no step for {stall_timeout_s:g} s")
            end_process_group()
        if served.dead():
            gate.dead = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(gate.wait_idle(), _DEATH_GRACE_S)
            # vLLM's own shutdown of a dead engine may wait for it; there is nothing left to save.
            end_process_group()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _REPORT_EVERY_S)


def main() -> None:
    """Entry point of the child process: `python -m serve_app.engines.host KIND`."""
    events = Events(os.dup(1))
    os.dup2(2, 1)  # what libraries print must not mix with the events
    # Ctrl-C in a terminal reaches the whole foreground group; only the supervisor decides when a host ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _take_ordinary_priority()
    os.register_at_fork(after_in_child=_die_with_parent)
    commands = Commands()
    commands.start()
    runtime = load_runtime(cast(EngineKind, sys.argv[1]))
    runtime.preload()
    # What was imported lives as long as the process. A collection that walked it in a forked engine core would write to
    # (and so copy) every page of it: 1.5 s of a load.
    gc.collect()
    gc.freeze()
    events.send("standby")
    try:
        uvloop.run(run(commands.first(), runtime, commands, events))
    except Exception as error:
        events.send("failed", message=f"{type(error).__name__}: {error}")
        traceback.print_exc()
    end_process_group()


if __name__ == "__main__":
    main()
