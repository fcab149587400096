"""PURE. The words between `policy` and `manager`: what is known, what happens, what is to be done.

All memory is in bytes, all time in seconds.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum


class Stage(StrEnum):
    """Where a lazy model is in its life on one replica."""

    STOPPED = "stopped"
    LOADING = "loading"
    AWAKE = "awake"
    FALLING_ASLEEP = "falling_asleep"
    ASLEEP = "asleep"
    WAKING = "waking"
    UNLOADING = "unloading"


@dataclasses.dataclass(frozen=True, slots=True)
class LazyModel:
    """What the policy knows of a model from the configuration. Times in seconds.

    `memory_bytes` is what it takes of the accelerator (of the host where there is none) while it is awake, and
    `asleep_bytes` what stays there while it sleeps (a CUDA context). `host_bytes` is what sleeping takes of the
    host's memory, `process_bytes` what any running engine takes of it. `sleeps`: whether it can sleep at all.
    """

    id: str
    memory_bytes: int
    priority: int
    idle_unload_s: float
    sleeps: bool = False
    asleep_bytes: int = 0
    host_bytes: int = 0
    process_bytes: int = 0
    load_s: float = 30.0
    wake_s: float = 2.0
    idle_sleep_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The replica's limits. Times in seconds.

    `host_bytes` is the host memory for processes and sleeping models; 0: nothing sleeps, and it is not counted.
    `evicts`: False makes a model that finds no room refused, instead of letting others go for it. `measured`: engines
    measure the accelerator while they load, and may fail where others give memory back or take some meanwhile.
    """

    memory_bytes: int
    min_residency_s: float
    ageing_s: float
    backoff_s: float
    host_bytes: int = 0
    grace_s: float = 10.0
    evicts: bool = True
    measured: bool = False


class Order(StrEnum):
    """What an operator (or the schedule) may ask for."""

    LOAD = "load"
    SLEEP = "sleep"
    UNLOAD = "unload"
    PIN = "pin"
    UNPIN = "unpin"


# Events


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """A request for the model waits here."""

    model: str


@dataclasses.dataclass(frozen=True, slots=True)
class Unwanted:
    """One waiting request has left."""

    model: str


@dataclasses.dataclass(frozen=True, slots=True)
class Activity:
    """The engine has taken or finished requests since its last report.

    So many are in flight now, and so many have arrived since it came up.
    """

    model: str
    in_flight: int
    arrived: int


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """The model answers. `seconds`: the time of its load; `memory_bytes`: what it was measured to take; 0: unknown."""

    model: str
    seconds: float = 0.0
    memory_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class LoadFailed:
    """The load ended without a running model; nothing of it is left."""

    model: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Slept:
    """The model sleeps; its accelerator memory is free."""

    model: str


@dataclasses.dataclass(frozen=True, slots=True)
class SleepFailed:
    """The model neither sleeps nor answers; it has to be ended."""

    model: str


@dataclasses.dataclass(frozen=True, slots=True)
class Woken:
    """The model answers again, after so many seconds."""

    model: str
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class WakeFailed:
    """The model could not be woken; nothing of it is left."""

    model: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Unloaded:
    """The model's memory is free."""

    model: str


@dataclasses.dataclass(frozen=True, slots=True)
class StillBusy:
    """The unload or the sleep found a request in flight and changed nothing. `arrived`: see `Activity`; 0: unknown."""

    model: str
    arrived: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Died:
    """A running engine ended by itself; its memory is free."""

    model: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Ordered:
    """An operator wants something done with the model."""

    model: str
    order: Order


@dataclasses.dataclass(frozen=True, slots=True)
class Replaced:
    """What the model's engine is made from has changed: one that is there, or on its way, is of no use any more."""

    model: str


@dataclasses.dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Wanted
    | Unwanted
    | Activity
    | Loaded
    | LoadFailed
    | Slept
    | SleepFailed
    | Woken
    | WakeFailed
    | Unloaded
    | StillBusy
    | Died
    | Ordered
    | Replaced
    | Tick
)


@dataclasses.dataclass(frozen=True, slots=True)
class Transition:
    """A model went from one state to another, after so many seconds in the first. `failed`: stopped, with a reason."""

    model: str
    was: str
    now: str
    after_s: float


# Actions


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Start the model; its memory is accounted for from now on."""

    model: str


@dataclasses.dataclass(frozen=True, slots=True)
class Abandon:
    """Give up the load that is under way; `Unloaded` says when nothing of it is left."""

    model: str


@dataclasses.dataclass(frozen=True, slots=True)
class Sleep:
    """Put the model to sleep. `drain`: it is in use; refuse new requests and wait for those in flight first."""

    model: str
    drain: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Wake:
    """Bring a sleeping model back."""

    model: str


@dataclasses.dataclass(frozen=True, slots=True)
class Unload:
    """End the model, awake or asleep. `drain`: as for `Sleep`."""

    model: str
    drain: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Grant:
    """The model is awake: let everybody who waits for it go ahead."""

    model: str


@dataclasses.dataclass(frozen=True, slots=True)
class Refuse:
    """Send everybody who waits for the model away."""

    model: str
    code: str
    reason: str
    retry_after_s: float


Action = Load | Abandon | Sleep | Wake | Unload | Grant | Refuse
