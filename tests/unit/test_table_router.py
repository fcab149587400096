"""serve_app.models.table_router: which replica a control call goes to. Ray's objects are stood in for; no cluster."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.models.replicas import PublishedModel, published
from serve_app.models.table_router import TableRouter

GB = 1_000_000_000


@dataclasses.dataclass(frozen=True)
class Replica:
    """What is read of Serve's `RunningReplica`."""

    name: str
    routing_stats: dict[str, Any]

    @property
    def replica_id(self) -> SimpleNamespace:
        return SimpleNamespace(unique_id=self.name)


def replica(name: str, state: str | None = None, used_gb: int = 0) -> Replica:
    models = {"m": PublishedModel(state)} if state else {}
    return Replica(name, published(models, moving=True, used_bytes=used_gb * GB, limit_bytes=80 * GB))


POOL = [
    replica("failed", "failed"),
    replica("full", used_gb=80),
    replica("roomy", used_gb=10),
    replica("asleep", "asleep"),
    replica("waking", "waking"),
    replica("awake", "awake"),
]


async def ranked(*args: Any, replicas: list[Replica] | None = None, **call: Any) -> list[str]:
    """The names of the replicas in the order in which Serve will try them."""
    pending = SimpleNamespace(args=list(args), kwargs=call)
    router = TableRouter.__new__(TableRouter)
    groups = await router.choose_replicas(POOL if replicas is None else replicas, pending)
    assert all(len(group) == 1 for group in groups)
    return [group[0].name for group in groups]


async def test_best_replica_is_tried_first_and_every_other_after_it() -> None:
    order = ["awake", "waking", "asleep", "roomy", "full", "failed"]
    assert await ranked("m", memory_bytes=6 * GB) == order
    assert await ranked("m", memory_bytes=6 * GB, replicas=POOL[::-1]) == order


@pytest.mark.case(122)
async def test_replica_without_room_for_this_model_comes_after_one_that_has_it() -> None:
    replicas = [replica("little", used_gb=75), replica("much", used_gb=10)]
    for size in (6, 60):
        assert (await ranked("m", memory_bytes=size * GB, replicas=replicas))[0] == "much"


async def test_replicas_to_avoid_are_not_tried() -> None:
    assert await ranked("m", memory_bytes=GB, avoid=("awake", "waking", "gone")) == [
        "asleep",
        "roomy",
        "full",
        "failed",
    ]
    assert await ranked("m", memory_bytes=GB, avoid=tuple(each.name for each in POOL)) == []


@pytest.mark.parametrize(("only", "found"), [("full", ["full"]), ("gone", []), (None, [each.name for each in POOL])])
async def test_order_for_one_replica_goes_to_no_other(only: str | None, found: list[str]) -> None:
    assert sorted(await ranked("m", "unload", memory_bytes=GB, only=only)) == sorted(found)


async def test_call_without_a_model_goes_to_any() -> None:
    router = TableRouter.__new__(TableRouter)
    assert len(await router.choose_replicas(POOL, None)) == len(POOL)
    assert len(await ranked()) == len(POOL)
