"""The third tier, operators and the schedule, on scripted engines: what cannot be had without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.service import Service, running, wait_until

pytestmark = pytest.mark.e2e

ASK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
LOAD_S, WAKE_S = 3.0, 0.2


@pytest.fixture(scope="module")
def sleepy() -> Iterator[Service]:
    """Room for one awake model and for all of them asleep."""
    lazy: dict[str, Any] = {"tier": "lazy", "context": 4096, "memory_gb": 2, "idle_unload_s": 600}
    script = {"load_s": LOAD_S, "wake_s": WAKE_S}
    models = [
        {"id": "hot", "tier": "resident", "context": 4096, "fake": {}},
        {"id": "first", **lazy, "preload": True, "expected_wake_s": 1, "fake": script},
        {"id": "org/second:1", **lazy, "fake": script},
        {"id": "insomniac", **lazy, "sleep": {"timeout_s": 1}, "fake": {"load_s": 0.2, "hang_sleep": True}},
        {"id": "comatose", **lazy, "sleep": {"timeout_s": 1}, "fake": {"load_s": 0.2, "hang_wake": True}},
    ]
    pool = {"memory_gb": 3, "host_memory_gb": 16, "min_residency_s": 0.5, "standby": False}
    with running(models, pool=pool) as service:
        yield service


def ask(service: Service, model: str) -> dict[str, str]:
    status, headers, answer = service.request("/v1/chat/completions", {"model": model, **ASK})
    assert status == 200, answer
    return headers


def order(service: Service, model: str, what: str) -> tuple[int, Any]:
    status, _, answer = service.request(f"/v1/router/models/{model}/{what}", {}, method="POST")
    return status, answer


def test_preloaded_model_is_up_before_anybody_asks(sleepy: Service) -> None:
    card = sleepy.in_state("first", "awake")
    assert card["loads"] == 1
    assert "x-router-cold-start-ms" not in ask(sleepy, "first")


@pytest.mark.case(127)
def test_model_that_makes_room_sleeps_and_wakes_without_a_load(sleepy: Service) -> None:
    sleepy.in_state("first", "awake")
    ask(sleepy, "org/second:1")
    assert sleepy.in_state("first", "asleep")["expected_wake_s"] <= 1
    loads = sleepy.model("first")["loads"]
    headers = ask(sleepy, "first")
    # It waits for the other's minimum residency, and for the wake; not for a load.
    assert int(headers["x-router-cold-start-ms"]) < LOAD_S * 1000
    card = sleepy.in_state("first", "awake")
    assert (card["loads"], card["wakes"] >= 1) == (loads, True)


@pytest.mark.parametrize("model", ["insomniac", "comatose"])
def test_model_that_hangs_on_its_way_to_or_from_sleep_is_ended_and_loaded_anew(sleepy: Service, model: str) -> None:
    ask(sleepy, model)
    loads = sleepy.in_state(model, "awake")["loads"]
    assert order(sleepy, model, "sleep")[0] == 202
    sleepy.in_state(model, "asleep" if model == "comatose" else "stopped")
    ask(sleepy, model)
    wait_until(lambda: sleepy.model(model)["loads"] == loads + 1, 5, "the second load is published")
    assert sleepy.ready()


def test_orders_of_an_operator(sleepy: Service) -> None:
    name = "org/second:1"
    assert order(sleepy, name, "load")[0] == 202
    sleepy.in_state(name, "awake")
    assert order(sleepy, name, "sleep") == (202, {"id": name, "order": "sleep", "state": "awake"})
    sleepy.in_state(name, "asleep")
    order(sleepy, name, "unload")
    sleepy.in_state(name, "stopped")


def test_pinned_model_is_not_evicted_and_who_cannot_have_its_memory_is_told(sleepy: Service) -> None:
    assert order(sleepy, "first", "pin")[0] == 202
    sleepy.in_state("first", "awake")
    assert sleepy.model("first")["pinned"] is True
    status, headers, answer = sleepy.request("/v1/chat/completions", {"model": "org/second:1", **ASK})
    assert (status, answer["error"]["code"]) == (503, "no_room")
    assert int(headers["retry-after"]) >= 1
    order(sleepy, "first", "unpin")
    ask(sleepy, "org/second:1")


def test_wrong_orders_say_what_would_be_right(sleepy: Service) -> None:
    assert order(sleepy, "hot", "unload")[0] == 400
    assert order(sleepy, "nobody", "load")[1]["error"]["code"] == "model_not_found"
    status, answer = order(sleepy, "first", "restart")
    assert status == 404
    assert "load, sleep, unload, pin, unpin" in answer["error"]["message"]
