"""The supervisor's side of an engine host: starts the child, talks to it, sees it die, ends all of it."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import logging
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
import psutil

from serve_app.engines.base import Address, EngineError, EngineKind, EngineLoad, EngineSpec, Phase, StuckError
from serve_app.engines.memory import still_there, taken_by

logger = logging.getLogger(__name__)

_EVENT_LIMIT_BYTES = 1 << 20
_TAIL_LINES = 200
_KILL_WAIT_S = 10.0
_FREED_POLL_S = 0.02
_LAST_WORDS_S = 1.0
# A ready host says something every second. Its event loop may be busy for a while (a huge prompt), not for this long.
_SILENCE_S = 30.0
_ANSWER_S = 10.0
# The line of a traceback that says what happened, with vLLM's log prefix or without.
_CAUSE = re.compile(r"(?:^|[\] ])((?:[A-Za-z_]+\.)*[A-Z]\w*(?:Error|Exception)): (.+)$")
_NOISE = re.compile(r"Engine core initialization failed|Engine core proc")


class StandbyHost:
    """A child that has imported its engine and waits for a model to run."""

    def __init__(self, kind: EngineKind, process: asyncio.subprocess.Process) -> None:
        self.kind = kind
        self.process = process
        self.ready = asyncio.Event()
        self.phase = Phase.STANDBY
        self.phase_seconds: dict[str, float] = {}
        self._phase_began = time.monotonic()
        self.in_flight = 0
        self.served = 0
        self.tokens = 0
        self.reported = EngineLoad()
        self.tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self.failure: str | None = None
        self.began = False
        self.started = asyncio.Event()
        self.exited = asyncio.Event()
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._commands = itertools.count()
        self._log = asyncio.create_task(self._read_log())
        self._events = asyncio.create_task(self._read_events())

    @classmethod
    async def spawn(cls, kind: EngineKind, log_level: str) -> StandbyHost:
        """Start a child; returns at once, `ready` is set when its imports are done."""
        environment = {**os.environ, "VLLM_LOGGING_LEVEL": log_level.upper(), "PYTHONUNBUFFERED": "1"}
        if kind == "vllm":
            from serve_app.engines.environment import host_environment

            environment |= host_environment()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "serve_app.engines.host",
            kind,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=_EVENT_LIMIT_BYTES,
            env=environment,
        )
        return cls(kind, process)

    def expect(self) -> None:
        """From now on somebody waits: the time before does not count as part of a start."""
        self._phase_began = time.monotonic()

    def send(self, cmd: str, **fields: Any) -> None:
        """Send one command; a child that is gone already does not mind."""
        assert self.process.stdin
        with contextlib.suppress(ConnectionError, RuntimeError):
            self.process.stdin.write(orjson.dumps({"cmd": cmd, **fields}) + b"\n")

    async def ask(self, cmd: str, timeout_s: float = _ANSWER_S, **fields: Any) -> dict[str, Any] | None:
        """Send a command and wait for its `done` event; None if the host is gone, or did not answer and was killed."""
        number = next(self._commands)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(cmd, number=number, **fields)
            await asyncio.wait_for(_first_of(answer, self.exited.wait()), timeout_s)
            return answer.result() if answer.done() and not answer.cancelled() else None
        except TimeoutError:
            # One that does not answer serves nobody either.
            self.failure = f"it hung: it did not answer to `{cmd}` for {timeout_s:g} s"
            self.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.exited.wait(), _KILL_WAIT_S)
            return None
        finally:
            del self._asked[number]

    def kill(self) -> None:
        """End the child and everything it started. It leads a process group of its own."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def processes(self) -> list[psutil.Process]:
        """The child and its descendants, as far as they live."""
        try:
            child = psutil.Process(self.process.pid)
            return [child, *child.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def cause(self) -> str:
        """Why it failed, in one sentence, as well as its last words tell."""
        if self.failure and self.failure.startswith("it hung"):
            return self.failure
        for line in reversed(self.tail):
            if (found := _CAUSE.search(line)) and not _NOISE.search(line):
                return f"{found[1]}: {found[2]}"
        code = self.process.returncode
        if self.failure:
            return self.failure
        if code is not None and code < 0:
            hint = " (out of memory?)" if -code == signal.SIGKILL else ""
            return f"its process was ended by {signal.Signals(-code).name}{hint}"
        return f"its process ended with status {code}"

    async def _read_events(self) -> None:
        assert self.process.stdout
        try:
            while line := await self._next_event(self.process.stdout):
                self._take(orjson.loads(line))
        except ValueError as error:
            logger.error("an engine host sent what is no event, and is ended: %s", error)
            self.kill()
        except TimeoutError:
            self.failure = f"it hung: it said nothing for {_SILENCE_S:g} s"
            self.kill()
        await self.process.wait()
        # A host that was killed alone leaves its engine core behind; nothing of the group may live on.
        self.kill()
        if self.process.stdin:
            self.process.stdin.close()
        # Its last words say why it ended; they are all there once nobody holds the other end.
        await asyncio.wait([self._log], timeout=_LAST_WORDS_S)
        self.phase, self.in_flight, self.reported = Phase.STOPPED, 0, EngineLoad()
        self.exited.set()

    async def _next_event(self, events: asyncio.StreamReader) -> bytes:
        # Before it is ready a host may be silent: a load blocks it, and has a deadline of its own.
        limit = _SILENCE_S if self.phase is Phase.READY else None
        return await asyncio.wait_for(events.readline(), limit)

    def _take(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "standby":
                self.ready.set()
            case "phase":
                self._enter(Phase(event["phase"]))
                self.began = True
            case "ready":
                self._enter(Phase.READY)
                self.started.set()
            case "activity":
                self.in_flight, self.served = event["in_flight"], event["served"]
                self.tokens, self.reported = event["tokens"], EngineLoad(**event["load"])
            case "done":
                self.in_flight, self.served = event["in_flight"], event["served"]
                if (waiting := self._asked.get(event["number"])) and not waiting.done():
                    waiting.set_result(event)
            case "failed":
                self.failure = event["message"]

    def _enter(self, phase: Phase) -> None:
        now = time.monotonic()
        self.phase_seconds[self.phase.value] = round(now - self._phase_began, 3)
        self.phase, self._phase_began = phase, now

    async def _read_log(self) -> None:
        assert self.process.stderr
        while True:
            try:
                line = await self.process.stderr.readline()
            except ValueError:
                continue  # one line longer than the limit; the reader has dropped it
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self.tail.append(text)
            print(text, file=sys.stderr, flush=True)


class EngineProcess:
    """The `Engine` that the deployments use: one model in one host process."""

    def __init__(
        self,
        spec: EngineSpec,
        address: Address,
        *,
        secret: str,
        log_level: str = "warning",
        standby: StandbyHost | None = None,
    ) -> None:
        self.spec = spec
        self.address = address
        self._secret = secret
        self._log_level = log_level
        self._host = standby
        self._wanted_end = False

    @property
    def phase(self) -> Phase:
        """What the engine is doing."""
        return self._host.phase if self._host else Phase.STOPPED

    @property
    def phase_seconds(self) -> Mapping[str, float]:
        """See `Engine.phase_seconds`. `standby`: the wait for imports; 0 where a standby host was ready."""
        return self._host.phase_seconds if self._host else {}

    @property
    def in_flight(self) -> int:
        """Requests in flight as last reported by the host (at most 0.2 s old)."""
        return self._host.in_flight if self._host else 0

    @property
    def served(self) -> int:
        """Requests served since the start, as last reported by the host."""
        return self._host.served if self._host else 0

    @property
    def reported(self) -> EngineLoad:
        """See `Engine.reported`; at most 0.2 s old."""
        return self._host.reported if self._host else EngineLoad()

    @property
    def in_flight_tokens(self) -> int:
        """About so many prompt tokens are in flight, as last reported by the host."""
        return self._host.tokens if self._host else 0

    @property
    def pid(self) -> int | None:
        """The host's process, for whoever wants to look (or to kill it in a test)."""
        return self._host.process.pid if self._host else None

    async def start(self) -> None:
        """See `Engine.start`."""
        began = time.monotonic()
        if self._host:
            await self._run_in(self._host)
        if self._host is None or (self._host.exited.is_set() and not self._host.began):
            # No standby, or it was killed while it stood by: that says nothing about the model.
            self._host = await StandbyHost.spawn(self.spec.kind, self._log_level)
            await self._run_in(self._host)
        if self._host.exited.is_set():
            raise EngineError(f"{self.spec.model_id} could not start: {self._host.cause()}")
        logger.info("%s is ready after %.1f s", self.spec.model_id, time.monotonic() - began)

    async def _run_in(self, host: StandbyHost) -> None:
        """Have the host run the model; returns when it is ready or has ended."""
        host.expect()
        try:
            async with asyncio.timeout(self.spec.load_timeout_s):
                await _first_of(host.ready.wait(), host.exited.wait())
                host.send(
                    "start",
                    spec=dataclasses.asdict(self.spec),
                    address=dataclasses.asdict(self.address),
                    secret=self._secret,
                )
                await _first_of(host.started.wait(), host.exited.wait())
        except TimeoutError:
            phase = host.phase
            await self._end(host)
            raise EngineError(
                f"{self.spec.model_id} was not ready after {self.spec.load_timeout_s:g} s; it was {phase}"
            ) from None
        except asyncio.CancelledError:
            await self._end(host)
            raise

    async def close_if_idle(self) -> bool:
        """See `Engine.close_if_idle`."""
        return await self._ask_to_close("close_if_idle")

    async def drain(self, timeout_s: float) -> bool:
        """See `Engine.drain`."""
        if not await self._ask_to_close("close"):
            return True
        host = self._host
        assert host
        deadline = time.monotonic() + timeout_s
        while host.in_flight and not host.exited.is_set():
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    async def _ask_to_close(self, command: str) -> bool:
        host = self._host
        if host is None or host.phase is not Phase.READY:
            return False
        answer = await host.ask(command)
        return bool(answer and answer["ok"])

    async def sleep(self, level: int) -> None:
        """See `Engine.sleep`."""
        host = self._host
        if host is None or host.phase is not Phase.READY:
            raise EngineError(f"{self.spec.model_id} is not running")
        host.phase = Phase.ASLEEP
        await self._steer(host, "sleep", level=level)

    async def wake(self) -> None:
        """See `Engine.wake`."""
        host = self._host
        if host is None or host.phase is not Phase.ASLEEP:
            raise EngineError(f"{self.spec.model_id} is not asleep")
        await self._steer(host, "wake")
        host.phase = Phase.READY

    async def _steer(self, host: StandbyHost, command: str, **fields: Any) -> None:
        answer = await host.ask(command, self.spec.steer_timeout_s, **fields)
        if answer is None:
            raise EngineError(f"{self.spec.model_id}: {command} ended it: {host.cause()}")
        if not answer["ok"]:
            raise EngineError(f"{self.spec.model_id}: {command} failed: {answer['message']}")

    async def stop(self, grace_s: float = 5.0) -> None:
        """See `Engine.stop`. The host gets `grace_s` to end by itself; then it is killed."""
        if (host := self._host) is None:
            return
        self._wanted_end = True
        # A host that has ended no longer tells whose parent it was.
        family = host.processes()
        host.send("stop")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(host.exited.wait(), grace_s)
        await self._end(host, family)

    async def _end(self, host: StandbyHost, family: Sequence[psutil.Process] = ()) -> None:
        processes = {*family, *host.processes()}
        host.kill()
        try:
            async with asyncio.timeout(_KILL_WAIT_S):
                await host.exited.wait()
                # An engine core that was orphaned may outlive its host for a moment, and hold the memory.
                while still_there(processes):  # noqa: ASYNC110 # polled
                    await asyncio.sleep(_FREED_POLL_S)
        except TimeoutError:
            raise StuckError(f"the processes of {self.spec.model_id} cannot be ended") from None

    def kill(self) -> None:
        """See `Engine.kill`."""
        if self._host:
            self._host.kill()

    async def wait_exit(self) -> str:
        """See `Engine.wait_exit`."""
        assert self._host, "wait_exit before start"
        await self._host.exited.wait()
        return "it was stopped" if self._wanted_end else self._host.cause()

    def memory_bytes(self) -> int:
        """See `Engine.memory_bytes`. Reads /proc for some milliseconds."""
        return taken_by(self._host.processes()) if self._host else 0


async def _first_of(*waits: Any) -> Any:
    """The result of the wait that ends first; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()
    finally:
        for task in tasks:
            task.cancel()


def new_secret() -> str:
    """A secret that only this deployment's Router and hosts know."""
    return secrets.token_urlsafe(32)
