"""A model whose replica no node can hold: its clients are told what is missing, and others are served."""

from __future__ import annotations

from typing import Any

import pytest
from asgi_call import Call
from relayed import COLD, HOT, body, config, empty_tables, hot_replicas
from scripted_pool import Pool
from scripted_upstream import Upstream, answer

from serve_app.config import Config
from serve_app.model_schema import Resources
from serve_app.models.placement import Node, lacking
from serve_app.models.replicas import set_replicas
from serve_app.router.app import RouterApp

__all__ = ["empty_tables"]
CPU_NODE = Node("1", "cpu", {"CPU": 16.0, "memory": 1e10})
H100_NODE = Node("2", "gpu", {"CPU": 8.0, "GPU": 2.0, "accelerator_type:H100": 1.0, "spot": 1.0})
A10G: dict[str, Any] = {"num_cpus": 1, "num_gpus": 1, "accelerator_type": "A10G"}


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        ({"num_cpus": 16}, ""),
        ({"num_gpus": 2, "accelerator_type": "H100"}, ""),
        ({"num_gpus": 0.5}, ""),
        ({"custom": {"spot": 1}}, ""),
        (A10G, "no node of the cluster offers accelerator_type: A10G"),
        ({"num_gpus": 4}, "no node of the cluster offers num_gpus: 4"),
        ({"custom": {"tpu": 1}}, "no node of the cluster offers tpu: 1"),
        ({"num_cpus": 16, "num_gpus": 1}, "no node of the cluster offers num_cpus: 16 with num_gpus: 1"),
    ],
)
def test_what_no_node_has_is_named(resources: dict[str, Any], said: str) -> None:
    assert lacking(Resources(**resources), [CPU_NODE, H100_NODE]) == said


def test_a_cluster_without_nodes_lacks_everything() -> None:
    assert lacking(Resources(), []) == "no node of the cluster offers num_cpus: 1"


OTHER = {"id": "other", "tier": "resident", "source": "o/o", "context": 4096, "resources": A10G}


@pytest.mark.case(73)
@pytest.mark.parametrize("model", ["other", COLD])
async def test_its_clients_hear_what_is_missing_and_the_hot_model_answers(model: str) -> None:
    plain = config(hold_s=0.1).model_dump()
    settings = Config.model_validate(
        {**plain, "models": [*plain["models"], OTHER], "pool": {"resources": A10G, "gpu_memory_gb": 80}}
    )
    pool = Pool()
    names = {HOT: "Hot", COLD: "Pool", "embedder": "Pool", "other": "Other"}
    app = RouterApp(settings, names, pool, "test", nodes=lambda: [CPU_NODE, H100_NODE])
    set_replicas("Pool", [])
    async with Upstream(answer(200, {"choices": []})) as upstream:
        hot_replicas(upstream)
        call = await Call(app, body(model=model)).done()
        assert (
            call.status,
            call.error["message"].endswith("no node of the cluster offers accelerator_type: A10G."),
        ) == (
            503,
            True,
        )
        assert int(call.headers["retry-after"]) >= 1
        assert (await Call(app, body()).done()).status == 200
        card = (await Call(app, path=f"/v1/models/{model}", method="GET").done()).json
        # A pool without a replica has none until somebody asks.
        said = "no node of the cluster offers accelerator_type: A10G" if model == "other" else None
        assert card["failure"] == said
        await app._relay.close()
    set_replicas("Other", [])
