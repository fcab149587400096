"""PURE. Which models go when another needs their room: what each is worth, what it frees, and the fewest that do.

Who goes first: the models of the lowest priority, and among them the one with the least expected loss for each
byte that it frees, `requests per second x seconds to bring it back / bytes` (Greedy-Dual-Size-Frequency, Cherkasova
1998, with a frequency that halves every `HALF_LIFE_S`). `make sim` compares it with LRU and others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from serve_app.residency.events import Limits, Stage
from serve_app.residency.slot import Slot

# After a grant the waiter's request is still on its way; the model is not idle until it had time to arrive.
LEASE_S = 5.0
# Minimum residency is there to make a swap worth its cost; for a swap of a second a minute would be absurd. With
# `make sim` under ping-pong: hold p99 13 s at 0, 17 s at 2, 26 s at 5, for 11,000, 7,000 and 4,100 wakes a day.
RESIDENCY_PER_SWAP = 2.0


class Victims:
    """The choice, within one replica's limits."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def may_sleep(self, slot: Slot) -> bool:
        """Whether it sleeps where it goes, and is not ended: the host has memory for sleepers, and it can."""
        return slot.model.sleeps and slot.may_sleep and bool(self._limits.host_bytes)

    def frees(self, slot: Slot) -> int:
        """Accelerator bytes that an awake model gives back at least."""
        return slot.bytes - (slot.model.asleep_bytes if self.may_sleep(slot) else 0)

    def value(
        self, now: float, *, asleep: bool = False, of_residue: bool = False
    ) -> Callable[[Slot], tuple[int, float, float, str]]:
        """What is lost by letting a model go, for each byte; the lowest goes first.

        `asleep`: as if all slept, by the host's bytes; `of_residue`: likewise, by the accelerator's that sleepers keep.
        """

        def value(slot: Slot) -> tuple[int, float, float, str]:
            if asleep or of_residue or slot.stage is Stage.ASLEEP:
                cost_s, size = slot.load_s - slot.wake_s, slot.model.host_bytes + slot.model.process_bytes
                if of_residue:
                    size = slot.model.asleep_bytes
            else:
                cost_s, size = (slot.wake_s if self.may_sleep(slot) else slot.load_s), slot.bytes
            return slot.model.priority, slot.rate(now) * cost_s / max(size, 1), slot.last_used, slot.model.id

        return value

    def stayed(self, slot: Slot, now: float) -> bool:
        """Whether it was up for as long as its load was worth."""
        back_s = slot.wake_s if self.may_sleep(slot) else slot.load_s
        return now - slot.since >= min(self._limits.min_residency_s, RESIDENCY_PER_SWAP * back_s)

    def may_drain(self, slot: Slot, now: float) -> bool:
        """Whether it may go although it is used: to a model that has waited for long."""
        # Not the lease: a stream of grants would renew it for ever. Those the load was for had their time.
        served = now - slot.since >= LEASE_S
        return slot.stage is Stage.AWAKE and not slot.claimed and served and self.stayed(slot, now)

    def choose(
        self, asleep: list[Slot], awake: list[Slot], missing: int, host_missing: int, now: float
    ) -> tuple[list[Slot], list[Slot]] | None:
        """Whom to end, and whom to let go, for that much room; None where it is not to be had from them."""
        ended = fewest([*asleep, *awake], host_missing, Slot.host)
        if host_missing > 0 and not ended:
            return None
        missing -= sum(slot.memory() for slot in ended)
        awake = [slot for slot in awake if slot not in ended]
        let_go = fewest(awake, missing, self.frees)
        if missing > 0 and not let_go:
            # A sleeping one holds little; but that little may be what is missing. It is weighed by that little: by
            # all its bytes the large models would go, which take longest to bring back.
            asleep = [slot for slot in asleep if slot not in ended]
            worth = self.value(now, of_residue=True)
            sleepers = [*asleep, *filter(self.may_sleep, awake)]
            sleepers.sort(key=lambda slot: (slot.claimed, worth(slot)))
            residue = fewest(sleepers, missing - sum(map(self.frees, awake)), lambda slot: slot.model.asleep_bytes)
            let_go = [slot for slot in awake if slot not in residue]
            if not residue:
                residue, let_go = fewest([*asleep, *awake], missing, Slot.memory), []
            if not residue:
                return None
            ended += residue
        return ended, let_go

    def abandonable(self, others: list[Slot], missing: int, host_missing: int, now: float) -> list[Slot]:
        """Loads that nobody wants any more, where giving them up makes the room."""
        forlorn = [
            slot
            for slot in others
            if slot.stage is Stage.LOADING and not slot.claimed and now - slot.left_at >= self._limits.grace_s
        ]
        given_up = fewest(forlorn, missing, Slot.memory) or fewest(forlorn, host_missing, Slot.host)
        enough = sum(s.memory() for s in given_up) >= missing and sum(s.host() for s in given_up) >= host_missing
        return given_up if enough else []


def fewest(candidates: Iterable[Slot], missing: int, frees: Callable[[Slot], int]) -> list[Slot]:
    """The first candidates that together free `missing` bytes, less those not needed; none if all do not."""
    chosen: list[Slot] = []
    for slot in candidates:
        if missing <= 0:
            break
        chosen.append(slot)
        missing -= frees(slot)
    if missing > 0:
        return []
    for slot in reversed(chosen):
        if missing + frees(slot) <= 0:
            chosen.remove(slot)
            missing += frees(slot)
    return chosen
