"""What a replica of the pool says of its models."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class ModelStatus:
    """What is published about one model. Times in seconds; `progress` from 0 to 1 while it comes up.

    `kv_cache`, `waiting`: see `EngineLoad`.

    `expected_load_s` is that of a whole load, `expected_wake_s` that from where it is now. `loads` and `wakes` count
    those that were begun since the replica started. `place`: in the queue for memory, from 1; 0: it does not wait.
    `phases`: how long each phase of the last start took.
    """

    state: str
    progress: float
    in_flight: int
    kv_cache: float
    waiting: int
    expected_load_s: float
    expected_wake_s: float
    loads: int
    wakes: int
    failure: str
    place: int
    memory_bytes: int
    pinned: bool
    phases: Mapping[str, float]
