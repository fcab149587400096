"""PURE. One lazy model as the policy sees it."""

from __future__ import annotations

import dataclasses
import math

from serve_app.residency.events import LazyModel, Order, Stage

# A Router asks again every few seconds for those who still wait; in between they keep their place in the queue.
PLACE_KEPT_S = 2.0
# With `make sim`: from a quarter to one and a half hours makes no difference; longer remembers last shift's models.
HALF_LIFE_S = 1800.0

RISING = frozenset({Stage.LOADING, Stage.WAKING})
GOING = frozenset({Stage.FALLING_ASLEEP, Stage.UNLOADING})


@dataclasses.dataclass(slots=True)
class Slot:
    """What the policy knows of one lazy model: its stage and since when, who wants it, what it takes. Times in seconds.

    `left`: the stage before; `wanted_since`: its place in the queue; `lease_until`: until then somebody to whom it was
    granted may still be on the way; `arrived`: requests since it came up; `disturbed`: others moved while it loaded;
    `outdated`: its engine was made from what has changed since.
    """

    model: LazyModel
    bytes: int
    load_s: float
    wake_s: float
    stage: Stage = Stage.STOPPED
    left: Stage = Stage.STOPPED
    since: float = 0.0
    waiting: int = 0
    wanted_since: float | None = None
    left_at: float = 0.0
    in_flight: int = 0
    last_used: float = 0.0
    lease_until: float = 0.0
    arrived: int = 0
    arrived_at_grant: int = 0
    failures: int = 0
    early_deaths: int = 0
    retry_at: float = 0.0
    failure: str = ""
    frequency: float = 0.0
    counted_at: float = 0.0
    pinned: bool = False
    ordered: bool = False
    may_sleep: bool = True
    ends_after_sleep: bool = False
    disturbed: bool = False
    tried_again: bool = False
    outdated: bool = False
    # What an operator wants of it as soon as it is up, unless somebody asks for it meanwhile.
    then: Order | None = None

    def enter(self, stage: Stage, now: float) -> None:
        """Be in this stage from now on."""
        self.left, self.stage, self.since = self.stage, stage, now
        self.then = None
        if stage is Stage.FALLING_ASLEEP:
            self.ends_after_sleep = False
        if stage is Stage.LOADING:
            self.disturbed = False
        if stage in (Stage.STOPPED, Stage.LOADING):
            self.outdated = False
        if stage in RISING:
            self.in_flight = self.arrived = self.arrived_at_grant = 0

    @property
    def claimed(self) -> bool:
        """Whether somebody wants it up: a waiting request, or an operator."""
        return bool(self.waiting) or self.ordered

    def line_up(self, now: float) -> None:
        """Take a place in the queue, or keep the one it has or has only just left."""
        if self.wanted_since is None or (not self.claimed and now - self.left_at > PLACE_KEPT_S):
            self.wanted_since = now

    def idle(self, now: float) -> bool:
        """Whether nobody uses it or is about to."""
        return self.stage is Stage.AWAKE and not self.in_flight and not self.claimed and now >= self.lease_until

    @property
    def holds_as(self) -> Stage:
        """The stage whose memory it holds: an unload gives nothing back before its end."""
        return self.left if self.stage is Stage.UNLOADING else self.stage

    def memory(self) -> int:
        """Accelerator memory that it has, will have, or has not given back yet."""
        if self.stage is Stage.STOPPED:
            return 0
        return self.model.asleep_bytes if self.holds_as is Stage.ASLEEP else self.bytes

    def host(self) -> int:
        """Host memory, likewise."""
        if self.stage is Stage.STOPPED:
            return 0
        asleep = self.holds_as in (Stage.ASLEEP, Stage.FALLING_ASLEEP, Stage.WAKING)
        return self.model.process_bytes + (self.model.host_bytes if asleep else 0)

    def count(self, requests: int, now: float) -> None:
        """So many more came."""
        self.frequency = self.rate(now) + requests
        self.counted_at = now

    def rate(self, now: float) -> float:
        """Requests of late, each counting half after `HALF_LIFE_S`."""
        return self.frequency * math.exp2((self.counted_at - now) / HALF_LIFE_S)
