"""The address on which a replica's engines listen."""

from __future__ import annotations

import ray


def engine_host(configured: str) -> str:
    """`node` stands for the address by which the other nodes of the cluster know this one."""
    return ray.util.get_node_ip_address() if configured == "node" else configured
