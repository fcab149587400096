"""The nodes of the cluster, and what a replica needs that none of them has. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from serve_app.model_schema import Resources


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One node that lives. `resources`: what it offers in all, as Ray names them."""

    id: str
    name: str
    resources: Mapping[str, float]


def lacking(resources: Resources, nodes: Sequence[Node]) -> str:
    """In words what no node offers; empty where one has it all.

    Whether they are taken just now is not looked at: who waits for those gets them some time.
    """
    needed = {f"num_cpus: {resources.num_cpus:g}": ("CPU", resources.num_cpus)}
    needed[f"num_gpus: {resources.num_gpus:g}"] = ("GPU", resources.num_gpus)
    if resources.accelerator_type:
        # Nodes offer 1 of what they are; a replica takes a sliver of it.
        needed[f"accelerator_type: {resources.accelerator_type}"] = (
            f"accelerator_type:{resources.accelerator_type}",
            0.001,
        )
    needed |= {f"{name}: {amount:g}": (name, amount) for name, amount in resources.custom.items()}
    if any(all(node.resources.get(name, 0) >= amount for name, amount in needed.values()) for node in nodes):
        return ""
    together = [words for words, (_, amount) in needed.items() if amount]
    alone = [
        words
        for words in together
        if not any(node.resources.get(needed[words][0], 0) >= needed[words][1] for node in nodes)
    ]
    return f"no node of the cluster offers {', '.join(alone) or ' with '.join(together)}"
