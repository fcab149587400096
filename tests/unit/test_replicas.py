"""serve_app.models.replicas: which replica is asked for a model that must come up, and for one that is up."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from serve_app.models.replicas import (
    PublishedModel,
    Target,
    choose,
    metadata,
    published,
    rank_for_load,
    read_replica,
)

GB = 1_000_000_000
# From the best to the worst: each line of equals before the next one.
BEST_FIRST = [
    [("awake", 80)],
    [("loading", 80), ("waking", 80)],
    [("asleep", 80), ("falling_asleep", 80)],
    [("stopped", 10), (None, 10), ("unloading", 10), (None, 74), ("of another version", 10)],
    [("stopped", 75), (None, 80), ("unloading", 75), (None, 100)],
    [("failed", 10), ("failed", 80)],
]


def rank(state: str | None, used_gb: float, replica: str = "r", model: str = "m") -> tuple[int, int]:
    """The rank for a model of 6 GB on a replica of 80 GB, so many of which are used."""
    models = {} if state is None else {model: PublishedModel(state)}
    stats = published(models, moving=True, used_bytes=int(used_gb * GB), limit_bytes=80 * GB)
    return rank_for_load(model, replica, stats, 6 * GB)


@pytest.mark.case(122)
@pytest.mark.parametrize(("better", "worse"), list(itertools.pairwise(BEST_FIRST)))
def test_replica_where_the_model_is_there_sooner_and_at_less_cost_is_asked_first(
    better: list[tuple[str | None, int]], worse: list[tuple[str | None, int]]
) -> None:
    # Whatever the replicas are called: their names count among equals only.
    for name, other in [("a", "b"), ("b", "a"), ("x1", "x2")]:
        for this, that in itertools.product(better, worse):
            assert rank(*this, replica=name) < rank(*that, replica=other)


@pytest.mark.parametrize("equals", BEST_FIRST)
def test_what_costs_the_same_is_equal(equals: list[tuple[str | None, int]]) -> None:
    assert len({rank(state, used) for state, used in equals}) == 1


def test_state_of_another_model_says_nothing() -> None:
    stats = published({"other": PublishedModel("awake")}, moving=True, limit_bytes=80 * GB)
    assert rank_for_load("m", "r", stats, 6 * GB) == rank(None, 0)


def test_replica_that_has_published_nothing_yet_has_just_come_and_has_room() -> None:
    assert rank_for_load("m", "r", {}, 6 * GB) == rank(None, 0)


def chosen(model: str, replicas: list[str]) -> str:
    return min(replicas, key=lambda replica: rank(None, 0, replica, model))


def replica_names(count: int) -> list[str]:
    """As Serve makes them."""
    letters = random.Random(count)
    return ["".join(letters.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=8)) for _ in range(count)]


@pytest.mark.case(122)
def test_every_router_asks_the_same_replica_in_whatever_order_it_knows_them() -> None:
    replicas = replica_names(5)
    for model in ("a", "org/b:7b", "千问"):
        assert len({chosen(model, list(order)) for order in itertools.permutations(replicas)}) == 1


@pytest.mark.parametrize("count", [2, 3, 5, 16])
def test_many_models_are_spread_evenly_over_equal_replicas(count: int) -> None:
    replicas = replica_names(count)
    fair = 100
    found = Counter(chosen(f"model-{i}", replicas) for i in range(count * fair))
    assert set(found) == set(replicas)
    assert fair / 2 < min(found.values()) <= max(found.values()) < fair * 1.5


def test_replica_that_goes_moves_only_its_own_models() -> None:
    replicas = replica_names(4)
    for i in range(200):
        before = chosen(f"model-{i}", replicas)
        assert before == replicas[0] or chosen(f"model-{i}", replicas[1:]) == before


# The table


def test_what_a_replica_publishes_is_read_again_as_it_was() -> None:
    model = PublishedModel("waking", progress=0.5, place=2, pinned=True, memory_bytes=6 * GB)
    stats = published({"m": model}, moving=False, used_bytes=1, limit_bytes=2)
    replica = read_replica("r", metadata({"m": "http://127.0.0.1:1"}, "secret"), stats)
    assert (replica.id, replica.urls, replica.secret) == ("r", {"m": "http://127.0.0.1:1"}, "secret")
    assert (replica.models, replica.moving) == ({"m": model}, False)
    assert (replica.used_bytes, replica.limit_bytes) == (1, 2)


def test_replica_of_another_version_may_publish_more_or_less() -> None:
    replica = read_replica("r", {}, {"models": {"m": {"state": "awake", "mood": "good"}}, "weather": "fine"})
    assert replica.models == {"m": PublishedModel("awake")}
    assert replica.moving
    assert read_replica("r", {}, {}).models == {}


def test_target_with_the_fewest_requests_is_chosen_of_those_not_yet_tried() -> None:
    load = {"a": 3, "b": 1, "c": 2}
    targets = [Target(name, f"http://{name}", "s") for name in load]
    assert choose(targets, load.__getitem__, ()) == targets[1]
    assert choose(targets, load.__getitem__, {"b"}) == targets[2]
    assert choose(targets, load.__getitem__, {"a", "b", "c"}) is None
