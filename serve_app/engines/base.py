"""The Engine protocol: what the deployments may ask of one running model, whatever runs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from typing import Any, Literal, Protocol

from starlette.types import ASGIApp

EngineKind = Literal["vllm", "fake"]

# Request header by which an engine host knows its Router; never passed on to or accepted from clients.
SECRET_HEADER = "x-switchyard-secret"
# Response header of an engine host that refuses before it did any work: the request may go elsewhere.
REFUSAL_HEADER = "x-switchyard-refusal"


class Refusal(StrEnum):
    """Why an engine host refused a request before touching it. All are safe to retry elsewhere."""

    FULL = "full"
    CLOSED = "closed"
    DEAD = "dead"


class Phase(StrEnum):
    """What an engine is doing; up to `READY` in this order. `READY` means that it has generated a token."""

    STANDBY = "standby"
    CONFIGURING = "configuring"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    ASLEEP = "asleep"
    STOPPED = "stopped"


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything an engine host needs to run one model; plain data that crosses the process boundary as JSON.

    `args` are the engine's own arguments (for vLLM: the fields of its command line, underscored).
    `max_ongoing` is the exact number of requests in flight; the next one is refused with 503.
    `steer_timeout_s`: how long falling asleep, or waking, may take before the engine is ended.
    `kv_cache_limit`: see `admission.kv_cache`; None: no limit. `stall_timeout_s`: see `stall`.
    """

    model_id: str
    kind: EngineKind
    source: str
    args: dict[str, Any]
    env: dict[str, str]
    max_ongoing: int
    load_timeout_s: float = 900.0
    steer_timeout_s: float = 60.0
    kv_cache_limit: float | None = None
    stall_timeout_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine's scheduler has to do, by its own account; all zero where it says nothing.

    `kv_cache`: part of its KV cache in use, from 0 to 1. `waiting`: requests that it has not begun, or pre-empted.
    """

    kv_cache: float = 0.0
    running: int = 0
    waiting: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """Where an engine host listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


class EngineError(Exception):
    """An engine could not start, or died. The message is one sentence for an operator."""


class StuckError(EngineError):
    """An engine's processes cannot be ended; they keep their memory."""


class Engine(Protocol):
    """One model, running or not. All waiting methods may be cancelled; `kill` always works."""

    spec: EngineSpec
    address: Address

    @property
    def phase(self) -> Phase:
        """What the engine is doing."""

    @property
    def phase_seconds(self) -> Mapping[str, float]:
        """How long each phase of the start took, as far as it is over."""

    @property
    def in_flight(self) -> int:
        """Requests in flight, as last reported."""

    @property
    def served(self) -> int:
        """Requests finished since the start, as last reported."""

    @property
    def reported(self) -> EngineLoad:
        """What its scheduler has to do, as last reported."""

    async def start(self) -> None:
        """Return once the first token was generated. Raises `EngineError`; nothing is left running then.

        Cancelled, it ends what it began. Where that does not work, either way raises `StuckError`.
        """

    async def close_if_idle(self) -> bool:
        """Stop admitting if nothing is in flight, atomically in the host. False: it is in use, and stays open."""

    async def drain(self, timeout_s: float) -> bool:
        """Stop admitting and wait for what is in flight. False: some of it is still running."""

    async def sleep(self, level: int) -> None:
        """Free the accelerator's memory. The engine must be closed and idle. Raises `EngineError`: end it then.

        Level 1 keeps the weights in the host's memory, level 2 reads them anew at the next wake.
        """

    async def wake(self) -> None:
        """Undo `sleep`, generate one token, and admit requests again. Raises `EngineError`: end it then."""

    async def stop(self, grace_s: float) -> None:
        """End the engine and return when its processes are gone and its memory with them. Raises `StuckError`."""

    def kill(self) -> None:
        """End all its processes now."""

    async def wait_exit(self) -> str:
        """Wait until the engine is gone; says why in one sentence."""

    def memory_bytes(self) -> int:
        """What all its processes take: of the GPUs where they use one, else of the host; 0 once they are gone."""


ReportPhase = Callable[[Phase], None]


@dataclasses.dataclass(frozen=True, slots=True)
class ServedApp:
    """What an engine runtime gives its host: the HTTP surface, and ways to know and to steer the engine.

    `sleep` takes the level; `wake` returns once a token was generated. `load` is called for each request.
    `steps`: how many its scheduler has taken, None where it keeps no count; `probe` has it generate a token.
    """

    app: ASGIApp
    dead: Callable[[], bool]
    attach_server: Callable[[Any], None]
    sleep: Callable[[int], Awaitable[None]]
    wake: Callable[[], Awaitable[None]]
    load: Callable[[], EngineLoad]
    steps: Callable[[], int | None]
    probe: Callable[[], Awaitable[None]]


class Runtime(Protocol):
    """The part of an engine that runs inside the host process; modules `vllm` and `fake` are the two."""

    def preload(self) -> None:
        """Import everything that any model will need, so that a later start costs only its own work."""

    def serve(self, spec: EngineSpec, report: ReportPhase) -> AbstractAsyncContextManager[ServedApp]:
        """Start the engine; the app is ready and warm when the context is entered."""
