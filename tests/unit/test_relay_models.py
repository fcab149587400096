"""The list of models, readiness, and what every answer has."""

import pytest
from asgi_call import Call
from relayed import COLD, HOT, PROMPT, behind, body, empty_tables, pool, routed, through
from scripted_pool import SECRET, Pool
from scripted_upstream import (
    answer,
)

from serve_app.models.replicas import PublishedModel, Replica, set_replicas

__all__ = ["empty_tables", "pool", "through"]


# The list of models


async def got(pool: Pool, path: str) -> Call:
    async with routed(pool) as app:
        return await Call(app, path=path, method="GET").done()


@pytest.mark.case(116)
async def test_every_listed_model_can_be_fetched_by_its_id(pool: Pool) -> None:
    listed = (await got(pool, "/v1/models")).json["data"]
    assert {card["id"] for card in listed} == {HOT, COLD, "embedder", "auto"}
    for card in listed:
        assert (card["object"], type(card["created"]), type(card["owned_by"])) == ("model", int, str)
    for card in listed:
        fetched = await got(pool, f"/v1/models/{card['id']}")
        assert (fetched.status, fetched.json["id"]) == (200, card["id"])


@pytest.mark.case(116)
async def test_model_is_fetched_by_its_alias_and_an_id_with_a_slash(pool: Pool) -> None:
    assert (await got(pool, "/v1/models/nick")).json["id"] == HOT
    assert (await got(pool, f"/v1/models/{HOT}")).json["tier"] == "resident"


@pytest.mark.case(67, 116)
async def test_cold_model_is_listed_with_its_state_and_wakes_nothing(pool: Pool) -> None:
    card = (await got(pool, f"/v1/models/{COLD}")).json
    assert (card["state"], card["expected_wake_s"], pool.asked) == ("stopped", 30, [])


@pytest.mark.case(67)
async def test_ready_tells_whether_the_resident_model_answers(pool: Pool) -> None:
    assert (await got(pool, "/health")).status == 200
    assert (await got(pool, "/ready")).status == 503
    async with behind(answer(200, {})) as (app, (upstream,)):
        assert (await Call(app, path="/ready", method="GET").done()).status == 200
        upstream.script = answer(500, {})
        assert (await Call(app, path="/ready", method="GET").done()).status == 503


@pytest.mark.case(115)
@pytest.mark.parametrize("state", ["failed", "stopped", "loading", "unloading", "asleep"])
async def test_trouble_of_a_lazy_model_is_a_detail_of_readiness(pool: Pool, state: str) -> None:
    async with behind(answer(200, {})) as (app, _):
        set_replicas(
            "Pool", [Replica("pool-0", {}, SECRET, {COLD: PublishedModel(state, failure="it was killed")}, True)]
        )
        ready = await Call(app, path="/ready", method="GET").done()
        assert (ready.status, ready.json["models"][HOT], ready.json["models"][COLD]) == (200, "awake", state)
        # By its alias the hot model answers as readiness says.
        assert (await Call(app, body(model="nick")).done()).status == 200


@pytest.mark.parametrize(("path", "method"), [("/v1/models", "GET"), ("/nowhere", "GET"), ("/v1/completions", "GET")])
async def test_every_answer_has_a_request_id(pool: Pool, path: str, method: str) -> None:
    async with routed(pool) as app:
        own = await Call(app, path=path, method=method, headers={"x-request-id": "job/42"}).done()
        assert own.headers["x-request-id"] == "job/42"
        assert (await Call(app, path=path, method=method).done()).headers["x-request-id"]


async def test_fault_of_our_own_is_a_500_in_openais_shape_and_logged_without_a_word_of_the_prompt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def breaks(*given: object) -> None:
        raise RuntimeError(PROMPT)

    async with behind(answer(200, {})) as (app, _):
        monkeypatch.setattr(app._decider, "decide", breaks)
        call = await Call(app, body()).done()
    assert (call.status, call.error["code"]) == (500, "internal_error")
    assert "RuntimeError" in caplog.text
    assert PROMPT not in caplog.text + str(call.json)
