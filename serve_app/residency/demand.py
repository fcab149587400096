"""PURE. What one pool replica tells the autoscaling policy: what it holds, and what it has no room for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class PoolDemand:
    """One replica now. `models.autoscaling.ReplicaDemand` is what the policy reads of it.

    `held`: calls that wait here. `awake`: models on the GPU; how long an unused one stays is its `idle_unload_s`.
    `coming`: models that load, or for which room is being made. `unmet`: bytes wanted by each model that waits and
    finds no room. A model is in one of `awake`, `coming` and `unmet` at most.
    """

    held: int = 0
    awake: frozenset[str] = frozenset()
    coming: frozenset[str] = frozenset()
    unmet: Mapping[str, int] = dataclasses.field(default_factory=dict)
    free_bytes: int = 0

    def stats(self) -> dict[str, float]:
        """For Serve's `record_autoscaling_stats`, which takes numbers only: so the models are in the keys."""
        return {
            "held": float(self.held),
            "free": float(self.free_bytes),
            "protected": float(bool(self.awake or self.coming)),
            **{f"awake:{model}": 1.0 for model in self.awake},
            **{f"coming:{model}": 1.0 for model in self.coming},
            **{f"unmet:{model}": float(wanted) for model, wanted in self.unmet.items()},
        }
