"""What a drill may do to clients, and what it did. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from tests.chaos.clients import Seen
from tests.chaos.report import Act


@dataclasses.dataclass(frozen=True, slots=True)
class Killed:
    """A node: when it was dead, its replicas by the audit's names, and the connections of Routers elsewhere."""

    at: float
    replicas: Collection[str]
    spared_ports: Collection[int]

    def excuses(self, one: Seen, replica: str | None) -> bool:
        """Whether this request was under way there, or was refused in order because something is missing now."""
        if one.outcome.startswith("503 "):
            return one.retry_after != ""
        on_engine = replica in self.replicas
        on_router = one.outcome in ("cut", "refused") and one.port not in self.spared_ports
        return one.began <= self.at and (on_engine or on_router)


def broken_promises(act: Act, killed: Killed | None, replicas: Mapping[str, str | None]) -> list[str]:
    """What clients met that they must not, in words. `replicas`: by request, as the audit has it.

    A stream may break where its Router or its engine was killed, and until all is there again a request may be
    refused with a 503 that says when to come again. Nothing else; and where nothing was killed that serves, nothing.
    """
    found: Counter[str] = Counter()
    for one in act.hurt:
        if act.after(one):
            found[f"{met(one)}, after all was there again"] += 1
        elif not one.allowed:
            found[f"{met(one)}, which no client may see"] += 1
        elif killed is None or not killed.excuses(one, replicas.get(one.id)):
            found[f"{met(one)}, and was not on what was killed"] += 1
    return [f"{what} × {count}" for what, count in found.most_common()]


def met(one: Seen) -> str:
    """How a request failed."""
    return f"{one.kind}: {one.outcome} {one.phase}".strip()


def as_json(act: Act, broken: list[str], replicas: Mapping[str, str | None]) -> dict[str, Any]:
    """One drill for a machine to read. Times in seconds since it was done."""
    return {
        "drill": act.name,
        "sent": len(act.seen),
        "finished": len(act.seen) - len(act.hurt),
        "failed": dict(Counter(met(one) for one in act.hurt)),
        "last_failed_began_s": round(act.last_hurt_s, 2) if act.hurt else None,
        "recovered_s": round(act.healed_s, 1),
        "failed_after_recovery": sum(map(act.after, act.hurt)),
        "slowest_s": round(act.slowest_s(), 2),
        "notes": act.notes,
        "broken_promises": broken,
        "failures": [
            {
                "request": one.id,
                "model": one.kind,
                "outcome": one.outcome,
                "phase": one.phase or ("before the first byte" if one.outcome[0].isdigit() else "mid-stream"),
                "began_s": round(one.began - act.struck_at, 2),
                "ended_s": round(one.ended - act.struck_at, 2),
                "replica": replicas.get(one.id),
            }
            for one in act.hurt
        ],
    }
