"""What a replica needs that no node of the cluster has. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from serve_app.model_schema import Resources


def lacking(resources: Resources, nodes: Sequence[Mapping[str, float]]) -> str:
    """In words what no node offers; empty where one has it all. `nodes`: each one's resources as Ray names them.

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
    if any(all(node.get(name, 0) >= amount for name, amount in needed.values()) for node in nodes):
        return ""
    together = [words for words, (_, amount) in needed.items() if amount]
    alone = [
        words for words in together if not any(node.get(needed[words][0], 0) >= needed[words][1] for node in nodes)
    ]
    return f"no node of the cluster offers {', '.join(alone) or ' with '.join(together)}"
