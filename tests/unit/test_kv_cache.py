"""When an engine takes no more because its KV cache is full: nothing is refused that fits, and who waits is served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from asgi_call import Call
from front import HOT, body, until
from hypothesis import given
from hypothesis import strategies as st
from scripted_pool import Pool
from vllm.v1.metrics.stats import SchedulerStats

from serve_app.admission.kv_cache import is_full, refuses
from serve_app.config import Config
from serve_app.engines.base import EngineLoad
from serve_app.engines.fake import serve
from serve_app.engines.gate import Gate
from serve_app.engines.port import reserve_port
from serve_app.engines.vllm import Meter
from serve_app.models.replicas import PublishedModel, Replica, set_replicas
from serve_app.router.app import RouterApp

LOADS = st.builds(EngineLoad, st.floats(0, 1), st.integers(0, 9), st.integers(0, 9))
LIMITS = st.floats(0.01, 1)


@pytest.mark.parametrize(
    ("load", "in_flight", "refused"),
    [
        pytest.param(EngineLoad(0.5, 3, 0), 3, False, id="room"),
        pytest.param(EngineLoad(0.96, 3, 0), 3, False, id="full, and nobody waits: one may"),
        pytest.param(EngineLoad(0.96, 3, 1), 4, True, id="full, and one waits"),
        pytest.param(EngineLoad(0.96, 3, 0), 4, True, id="full, and one has come since the engine's last step"),
        pytest.param(EngineLoad(0.5, 3, 5), 8, False, id="they wait for something else"),
        pytest.param(EngineLoad(0.96, 3, 1), 0, False, id="said before everybody left"),
    ],
)
def test_one_more_is_refused_where_the_cache_is_full_and_somebody_waits_for_it(
    load: EngineLoad, in_flight: int, refused: bool
) -> None:
    assert refuses(load, in_flight, 0.95) is refused


@given(LOADS, st.integers(0, 20))
def test_without_a_limit_nothing_is_refused(load: EngineLoad, in_flight: int) -> None:
    assert not refuses(load, in_flight, None)


@given(LOADS, LIMITS)
def test_idle_engine_takes_a_request_whatever_was_said_of_it(load: EngineLoad, limit: float) -> None:
    assert not refuses(load, 0, limit)


@given(LOADS, LIMITS, st.integers(1, 20))
def test_engine_that_is_full_by_its_own_word_refuses(load: EngineLoad, limit: float, in_flight: int) -> None:
    assert not is_full(load, limit) or refuses(load, in_flight, limit)


@contextlib.asynccontextmanager
async def service(kv_places: int, **model: Any) -> AsyncIterator[tuple[RouterApp, Gate]]:
    """A Router and a scripted engine behind its gate; so many requests have room in its KV cache."""
    script = {"kv_places": kv_places, "tokens": 3, "ttft_s": 0.02}
    config = Config.model_validate(
        {
            "models": [{"id": HOT, "tier": "resident", "context": 4096, "fake": script, **model}],
            "audit": {"sink": "none"},
        }
    )
    spec = config.engine_spec(config.models[0])
    address, reserved = reserve_port("127.0.0.1")
    reserved.close()
    async with serve(spec, lambda phase: None) as served:
        gate = Gate(
            served.app, max_ongoing=spec.max_ongoing, secret="s", load=served.load, kv_cache_limit=spec.kv_cache_limit
        )
        server = uvicorn.Server(uvicorn.Config(gate, port=address.port, log_level="warning", lifespan="off"))
        running = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        set_replicas("Hot", [Replica("r", {HOT: address.url}, "s", {HOT: PublishedModel("awake")}, True)])
        app = RouterApp(config, {HOT: "Hot"}, Pool(), "test")
        try:
            yield app, gate
        finally:
            await app._relay.close()
            set_replicas("Hot", [])
            server.should_exit = True
            await running


async def asked(app: RouterApp, count: int) -> list[Call]:
    return [Call(app, body(f"{number} fake[tokens=40,tpot_s=0.02]")) for number in range(count)]


async def test_burst_beyond_the_cache_waits_in_the_router_and_is_all_served() -> None:
    async with service(2, kv_cache_limit=0.9) as (app, gate):
        calls = await asked(app, 2)
        await until(lambda: gate.in_flight == 2)
        calls += await asked(app, 6)
        await until(lambda: len(app._lines[HOT]) == 5)
        # Two run, and one waits in the engine for the next room.
        assert gate.in_flight == 3
        assert [(await call.done()).status for call in calls] == [200] * 8
        assert app._relay.in_flight.total() == 0


async def test_without_a_limit_the_engine_takes_them_all() -> None:
    async with service(2) as (app, gate):
        calls = await asked(app, 8)
        await until(lambda: gate.in_flight == 8)
        assert len(app._lines[HOT]) == 0
        assert [(await call.done()).status for call in calls] == [200] * 8


async def test_who_finds_no_room_in_cache_and_queue_is_told_when_to_come_back() -> None:
    async with service(1, kv_cache_limit=0.9, queue={"size": 1}) as (app, gate):
        calls = await asked(app, 2)
        await until(lambda: gate.in_flight == 2)
        calls += await asked(app, 1)
        await until(lambda: len(app._lines[HOT]) == 1)
        refused = await Call(app, body()).done()
        assert (refused.status, refused.error["code"]) == (503, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        assert [(await call.done()).status for call in calls] == [200] * 3


async def test_clients_that_leave_the_engine_make_room_for_who_waits() -> None:
    async with service(1, kv_cache_limit=0.9) as (app, gate):
        leavers = await asked(app, 2)
        await until(lambda: gate.in_flight == 2)
        calls = await asked(app, 1)
        await until(lambda: len(app._lines[HOT]) == 1)
        for leaver in leavers:
            leaver.disconnect()
        assert (await calls[0].done()).status == 200


# What vLLM says, in the words of its own types.


def stats(kv_cache: float, running: int, waiting: int, skipped: int = 0) -> SchedulerStats:
    return SchedulerStats(
        kv_cache_usage=kv_cache, num_running_reqs=running, num_waiting_reqs=waiting, num_skipped_waiting_reqs=skipped
    )


def test_what_vllm_says_is_of_its_last_step_and_for_a_while_only() -> None:
    now = 100.0
    meter = Meter(clock=lambda: now)
    listener = meter.factory()(None, 0)
    assert meter.load() == EngineLoad()
    listener.record(stats(0.5, 2, 1), None)
    listener.record(stats(0.97, 3, 4, 1), None, mm_cache_stats=None, engine_idx=0)
    listener.record(None, None)
    assert meter.load() == EngineLoad(0.97, 3, 5)
    # Requests that were dropped between two steps are not told of: an idle engine takes none.
    now += 6
    assert meter.load() == EngineLoad()


def test_of_several_engine_cores_the_emptiest_cache_counts_and_the_requests_of_all() -> None:
    meter = Meter()
    for index, said in enumerate((stats(0.9, 3, 1), stats(0.2, 1, 0))):
        meter.factory()(None, index).record(said, None, engine_idx=index)
    assert meter.load() == EngineLoad(0.2, 4, 1)
