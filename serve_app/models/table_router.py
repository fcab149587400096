"""Serve's public extension point for routing: keeps `replicas`' table true, and ranks control calls."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

# The module, not names out of it: Serve (2.60) ships this class by value, and a name would be copied along,
# with a table of its own that nobody reads. A module is found again by its name.
from serve_app.models import replicas as table


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
                table.read_replica(
                    replica.replica_id.unique_id, replica.replica_metadata, replica.routing_stats, replica.node_id
                )
                for replica in replicas
            ),
        )

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Rank the replicas for one control call. Its arguments: see `LazyPool.acquire`."""
        call = pending_request.kwargs if pending_request else {}
        model = str(pending_request.args[0]) if pending_request and pending_request.args else ""
        only, avoid = call.get("only"), call.get("avoid", ())
        ranked = sorted(
            (
                (table.rank_for_load(model, name, replica.routing_stats, call.get("memory_bytes", 0)), replica)
                for replica in candidate_replicas
                if (name := replica.replica_id.unique_id) not in avoid and only in (None, name)
            ),
            key=lambda pair: pair[0],
        )
        return [[replica] for _, replica in ranked]
