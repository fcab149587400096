"""serve_app.router.overview: models, pool and nodes as the feed says them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from asgi_call import Call
from scripted_pool import Pool
from test_events import of, once

from serve_app.config import Config
from serve_app.models.placement import Node
from serve_app.models.replicas import PublishedModel, Replica, set_replicas
from serve_app.router.app import RouterApp

GB = 1_000_000_000
NODES = [Node("node-1", "gpu-1", {"CPU": 8, "GPU": 8}), Node("node-2", "cpu-1", {"CPU": 64})]
HOT = {
    "id": "hot",
    "tier": "resident",
    "source": "org/hot",
    "context": 4096,
    "resources": {"num_gpus": 2},
    "thinking": {"supported": True},
    "engine": {"reasoning_parser": "qwen3"},
}
ADAPTER = {"id": "hot-lora", "tier": "resident", "context": 4096, "base": "hot", "adapter": "org/lora"}
SHARE = {"gpu_memory_utilization": 0.3}
LAZY = {"tier": "lazy", "source": "org/lazy", "context": 512, "memory_gb": 6.0, "engine": SHARE}
ELSEWHERE = {
    "id": "elsewhere",
    "tier": "resident",
    "context": 512,
    "external": {"urls": ["http://127.0.0.1:1/v1"]},
}
CONFIG = Config.model_validate(
    {
        "models": [HOT, ADAPTER, {"id": "big", **LAZY}, {"id": "small", **LAZY}, ELSEWHERE],
        "pool": {"resources": {"num_gpus": 0.5}, "memory_gb": 20, "host_memory_gb": 30},
        "audit": {"sink": "none"},
    }
)
TABLES = {"hot": "Hot", "hot-lora": "Hot", "big": "Pool", "small": "Pool", "elsewhere": "Elsewhere"}


def pool_replica(name: str, **models: PublishedModel) -> Replica:
    return Replica(name, {}, "s", models, True, 6 * GB, 20 * GB, None, "node-1", 7 * GB, 30 * GB)


@pytest.fixture(autouse=True)
def replicas() -> Iterator[None]:
    hot = PublishedModel("awake", in_flight=3, waiting=1, memory_bytes=9 * GB)
    set_replicas(
        "Hot", [Replica(f"hot-{i}", {"hot": "http://x"}, "s", {"hot": hot}, True, node="node-1") for i in "ab"]
    )
    set_replicas("Pool", [])
    set_replicas(
        "Elsewhere",
        [Replica("elsewhere@x", {}, "", {"elsewhere": PublishedModel("failed", failure="no answer")}, True)],
    )
    yield
    for table in set(TABLES.values()):
        set_replicas(table, [])


async def seen() -> dict[str, Any]:
    app = RouterApp(CONFIG, TABLES, Pool(), "test", nodes=lambda: NODES)
    (said,) = of(await once(app), "models")
    await app._relay.close()
    return dict(said)


async def model(name: str) -> dict[str, Any]:
    (found,) = [each for each in (await seen())["models"] if each["id"] == name]
    return dict(found)


async def test_a_resident_model_is_the_sum_of_its_replicas() -> None:
    found = await model("hot")
    assert (found["tier"], found["state"], found["phase"], found["progress"]) == ("resident", "awake", None, None)
    assert found["replicas"] == [{"id": f"hot-{i}", "node": "node-1", "state": "awake"} for i in "ab"]
    assert (found["running"], found["waiting"], found["queued"]) == (6, 2, 0)
    assert (found["gpu_bytes"], found["host_bytes"], found["wake_s"]) == (18 * GB, None, None)
    assert found["thinking"]
    assert (found["last_used_s"], found["context"]) == (0, 4096)


async def test_an_adapter_runs_where_its_base_does_and_takes_nothing_of_its_own() -> None:
    found = await model("hot-lora")
    assert (found["state"], found["gpu_bytes"], len(found["replicas"])) == ("awake", None, 2)


async def test_a_load_tells_its_phase_and_progress() -> None:
    loading = PublishedModel("loading", progress=0.4, expected_wake_s=6, memory_bytes=6 * GB, phases={"standby": 0.1})
    set_replicas("Pool", [pool_replica("p1", big=loading)])
    found = await model("big")
    assert (found["state"], found["phase"], found["progress"]) == ("loading", "configuring", 0.4)
    assert (found["wake_s"], found["gpu_bytes"]) == (6, 6 * GB)


async def test_a_model_asleep_holds_what_the_configuration_counts_for_it() -> None:
    set_replicas("Pool", [pool_replica("p1", big=PublishedModel("asleep", memory_bytes=6 * GB, pinned=True))])
    found = await model("big")
    assert (found["gpu_bytes"], found["host_bytes"]) == (int(0.8 * GB), 6 * GB)
    assert found["pinned"]


async def test_a_model_that_is_stopped_or_failed_holds_nothing_and_says_why() -> None:
    failed = PublishedModel("failed", failure="no memory", memory_bytes=6 * GB)
    stopped = PublishedModel("stopped", memory_bytes=6 * GB, expected_wake_s=20)
    set_replicas("Pool", [pool_replica("p1", big=failed, small=stopped)])
    found = await model("big")
    assert (found["error"], found["gpu_bytes"]) == ("no memory", None)
    found = await model("small")
    assert (found["replicas"], found["gpu_bytes"], found["wake_s"]) == ([], None, 20)


async def test_a_server_that_is_not_ours_is_external_and_says_why_it_is_away() -> None:
    found = await model("elsewhere")
    assert (found["tier"], found["state"], found["error"]) == ("external", "failed", "no answer")


async def test_pool_and_nodes_are_summed_over_what_runs_there() -> None:
    assert (await seen())["pool"] is None
    set_replicas("Pool", [pool_replica("p1"), pool_replica("p2")])
    said = await seen()
    assert said["pool"] == {
        "gpu_used": 12 * GB,
        "gpu_budget": 40 * GB,
        "host_used": 14 * GB,
        "host_budget": 60 * GB,
    }
    assert said["nodes"] == [
        {"id": "node-1", "name": "gpu-1", "gpus": 8, "gpus_used": 5},
        {"id": "node-2", "name": "cpu-1", "gpus": 0, "gpus_used": 0},
    ]


async def test_who_is_no_operator_sees_neither_pool_nor_nodes() -> None:
    set_replicas("Pool", [pool_replica("p1")])
    config = CONFIG.model_copy(update={"router": CONFIG.router.model_copy(update={"host": "0.0.0.0"})})
    app = RouterApp(config, TABLES, Pool(), "test", nodes=lambda: NODES)
    call: Call = await once(app)
    assert not of(call, "hello")[0]["admin"]
    (said,) = of(call, "models")
    assert (said["pool"], said["nodes"]) == (None, [])
    assert {replica["node"] for each in said["models"] for replica in each["replicas"]} == {None}
    await app._relay.close()
