"""Serve's public extension point for routing: keeps `replicas`' table true, and ranks control calls."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

# The module, not names out of it: Serve (2.60) ships this class by value, and a name would be copied along,
# with a table of its own that nobody reads. A module is found again by its name.
from serve_app.models import replicas as table

# Awake costs nothing, a load under way is joined; then comes who has room. The rest would have to evict.
_RANKS = {"awake": 0, "loading": 1}
_HAS_ROOM = 2
_MUST_EVICT = 3


class TableRouter(RequestRouter):  # type: ignore[misc] # Ray is not typed
    """One deployment's table in this process, and the choice of the replica that a control call goes to."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Serve's hook for `request_router_kwargs`: the name under which to keep the table."""
        self._table = str(kwargs["table"])

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve calls this whenever a replica comes, goes, or publishes something new."""
        super().update_replicas(replicas)
        table.set_replicas(
            self._table,
            (
                table.read_replica(replica.replica_id.unique_id, replica.replica_metadata, replica.routing_stats)
                for replica in replicas
            ),
        )

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Rank the replicas for one control call; its first argument is the model's id."""
        model = pending_request.args[0] if pending_request and pending_request.args else None
        ranks: dict[int, list[RunningReplica]] = {}
        for replica in candidate_replicas:
            published = replica.routing_stats.get("models", {}).get(model, {})
            # One that has published nothing has just come, and is empty.
            otherwise = _HAS_ROOM if published.get("fits", True) else _MUST_EVICT
            ranks.setdefault(_RANKS.get(str(published.get("state")), otherwise), []).append(replica)
        return [ranks[rank] for rank in sorted(ranks)]
