"""serve_app.router.admin: who may give orders, what is refused, and which replicas hear of it."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from asgi_call import Call
from scripted_pool import SECRET, Pool

from serve_app.config import Config
from serve_app.models.replicas import PublishedModel, Replica, set_replicas
from serve_app.router.app import RouterApp

HOT, COLD, PLAIN = "org/hot:1b", "org/cold:7b", "plain"
KEY = "an-operators-key"
ORDERS = ["load", "sleep", "unload", "pin", "unpin"]


def config(host: str = "127.0.0.1", keys: tuple[str, ...] = ()) -> Config:
    models = [
        {"id": HOT, "tier": "resident", "source": "org/hot", "context": 4096},
        {"id": COLD, "aliases": ["nick", "a:b/c"], "tier": "lazy", "source": "org/cold", "context": 2048},
        {"id": PLAIN, "tier": "lazy", "source": "org/plain", "context": 2048},
    ]
    hashed = [
        {"id": f"op-{place}", "sha256": hashlib.sha256(key.encode()).hexdigest(), "admin": True}
        for place, key in enumerate(keys)
    ]
    return Config.model_validate({"models": models, "router": {"host": host}, "security": {"keys": hashed}})


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture(autouse=True)
def empty_table() -> Iterator[None]:
    yield
    set_replicas("Pool", [])


@contextlib.asynccontextmanager
async def routed(pool: Pool, settings: Config, *, front_door: bool = True) -> AsyncIterator[RouterApp]:
    deployments = {HOT: "Hot", COLD: "Pool", PLAIN: "Pool"}
    app = RouterApp(settings, deployments, pool, "test", front_door=front_door)
    yield app
    await app._relay.close()


async def told(
    pool: Pool,
    name: str = PLAIN,
    order: str = "load",
    *,
    settings: Config | None = None,
    authorization: str | None = None,
    method: str = "POST",
    front_door: bool = True,
) -> Call:
    headers = {} if authorization is None else {"authorization": authorization}
    async with routed(pool, settings or config(), front_door=front_door) as app:
        path = f"/v1/router/models/{name}/{order}"
        return await Call(app, path=path, method=method, headers=headers).done()


def publish(**models: PublishedModel | None) -> None:
    """The plain model as each replica publishes it; None: it says nothing about it."""
    set_replicas(
        "Pool",
        [Replica(name, {}, SECRET, {PLAIN: model} if model else {}, True) for name, model in models.items()],
    )


# Who may


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
async def test_without_keys_everybody_may_where_only_this_machine_can_ask(pool: Pool, host: str) -> None:
    assert (await told(pool, settings=config(host))).status == 202
    assert pool.orders == [(PLAIN, "load", None)]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "router.example.org", "localhost.example.org"])
@pytest.mark.parametrize("authorization", [None, f"Bearer {KEY}"])
async def test_without_keys_nobody_may_where_others_can_ask(pool: Pool, host: str, authorization: str | None) -> None:
    call = await told(pool, settings=config(host), authorization=authorization)
    assert (call.status, pool.orders) == (401, [])


async def test_without_keys_nobody_may_through_serves_own_ingress_which_listens_elsewhere(pool: Pool) -> None:
    assert (await told(pool, front_door=False)).status == 401
    keyed = await told(pool, settings=config(keys=(KEY,)), authorization=f"Bearer {KEY}", front_door=False)
    assert keyed.status == 202


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_right_key_may_and_any_of_several(pool: Pool, host: str, scheme: str) -> None:
    settings = config(host, keys=("another", KEY))
    assert (await told(pool, settings=settings, authorization=f"{scheme} {KEY}")).status == 202
    assert (await told(pool, settings=settings, authorization=f"{scheme} another")).status == 202


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Bearer{KEY}"])
async def test_no_key_is_a_401_in_openais_shape(pool: Pool, host: str, authorization: str | None) -> None:
    call = await told(pool, settings=config(host, keys=(KEY,)), authorization=authorization)
    assert (call.status, call.error["type"]) == (401, "authentication_error")
    assert (call.error["code"], pool.orders) == ("missing_api_key", [])
    assert "Authorization: Bearer" in call.error["message"]


DIGEST = hashlib.sha256(KEY.encode()).hexdigest()


@pytest.mark.parametrize("key", ["wrong", KEY + "x", KEY[:-1], KEY.upper(), DIGEST, "schl\xfcssel"])
async def test_wrong_key_is_a_401_in_openais_shape_that_does_not_repeat_it(pool: Pool, key: str) -> None:
    call = await told(pool, settings=config(keys=(KEY,)), authorization=f"Bearer {key}")
    assert (call.status, call.error["type"]) == (401, "authentication_error")
    assert (call.error["code"], pool.orders) == ("invalid_api_key", [])
    assert key not in call.error["message"]


async def test_stranger_does_not_learn_which_models_there_are(pool: Pool) -> None:
    settings = config(keys=(KEY,))
    answers = [await told(pool, name, settings=settings) for name in (PLAIN, "nope", HOT)]
    assert {call.status for call in answers} == {401}
    assert len({call.body for call in answers}) == 1


# What is refused


@pytest.mark.parametrize("name", ["nope", "auto", "org", "org/cold", "org/cold:7b/more"])
async def test_unknown_model_is_a_404(pool: Pool, name: str) -> None:
    call = await told(pool, name)
    assert (call.status, call.error["code"], pool.orders) == (404, "model_not_found", [])


@pytest.mark.parametrize("order", ["wake", "LOAD", "delete", "load "])
async def test_unknown_order_is_a_404_that_names_those_there_are(pool: Pool, order: str) -> None:
    call = await told(pool, order=order)
    assert (call.status, call.error["code"], pool.orders) == (404, "not_found", [])
    assert ", ".join(ORDERS) in call.error["message"]


@pytest.mark.parametrize("order", ORDERS)
async def test_resident_model_takes_no_orders(pool: Pool, order: str) -> None:
    call = await told(pool, HOT, order)
    assert (call.status, call.error["type"], pool.orders) == (400, "invalid_request_error", [])
    assert f"{HOT} is resident" in call.error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/router/models/plain/load", 405),
        ("DELETE", "/v1/router/models/plain/load", 405),
        ("POST", "/v1/router/models/load", 404),
        ("POST", "/v1/router/models/plain/load/", 404),
        ("POST", "/v1/router/models//load", 404),
    ],
)
async def test_other_methods_and_paths_are_refused(pool: Pool, method: str, path: str, status: int) -> None:
    async with routed(pool, config()) as app:
        call = await Call(app, path=path, method=method).done()
    assert (call.status, pool.orders) == (status, [])
    assert call.error


async def test_order_that_the_pool_refuses_is_a_503_with_its_reason(pool: Pool) -> None:
    pool.order_answers.append({"refused": {"code": "no_room", "reason": "pinned models", "retry_after_s": 60}})
    call = await told(pool)
    assert (call.status, call.error["code"], call.headers["retry-after"]) == (503, "no_room", "60")
    assert "pinned models" in call.error["message"]


@pytest.mark.parametrize("error", [TimeoutError(), RuntimeError("actor died")])
async def test_order_to_a_pool_that_does_not_answer_is_a_503(pool: Pool, error: Exception) -> None:
    pool.order_answers.append(error)
    call = await told(pool)
    assert (call.status, call.error["code"]) == (503, "pool_unavailable")
    assert int(call.headers["retry-after"]) >= 1
    assert "actor" not in call.error["message"]


# Where it goes


@pytest.mark.parametrize("name", [COLD, "nick", "a:b/c"])
async def test_ids_and_aliases_may_hold_slashes_and_colons(pool: Pool, name: str) -> None:
    call = await told(pool, name, "pin")
    assert (call.status, call.json["id"], pool.orders) == (202, COLD, [(COLD, "pin", None)])


async def test_answer_says_what_was_ordered_and_the_state_that_is_known(pool: Pool) -> None:
    publish(one=PublishedModel("awake"))
    call = await told(pool, order="sleep")
    assert call.json == {"id": PLAIN, "order": "sleep", "state": "awake"}


UP: dict[str, Any] = {
    "awake": PublishedModel("awake"),
    "asleep": PublishedModel("asleep"),
    "loading": PublishedModel("loading"),
    "gone": PublishedModel("stopped", loads=1),
    "broken": PublishedModel("failed", loads=1),
    "fresh": None,
}


@pytest.mark.parametrize("order", ["sleep", "unload", "pin", "unpin"])
async def test_order_goes_to_every_replica_where_the_model_is_up(pool: Pool, order: str) -> None:
    publish(**UP)
    assert (await told(pool, order=order)).status == 202
    assert pool.orders == [(PLAIN, order, name) for name in ("awake", "asleep", "loading")]


async def test_load_goes_to_the_one_replica_that_the_pool_finds_best(pool: Pool) -> None:
    publish(**UP)
    await told(pool, order="load")
    assert pool.orders == [(PLAIN, "load", None)]


async def test_model_that_is_nowhere_is_pinned_where_the_pool_finds_best(pool: Pool) -> None:
    publish(gone=PublishedModel("stopped", loads=1), fresh=None)
    await told(pool, order="pin")
    assert pool.orders == [(PLAIN, "pin", None)]


@pytest.mark.parametrize("order", ["sleep", "unload", "unpin"])
async def test_order_may_follow_a_load_before_anything_is_published_of_it(pool: Pool, order: str) -> None:
    publish(gone=PublishedModel("stopped", loads=1), broken=PublishedModel("failed", loads=1), fresh=None)
    assert (await told(pool, order=order)).status == 202
    # As the load did: to the one that the pool finds best.
    assert pool.orders == [(PLAIN, order, None)]


@pytest.mark.parametrize("state", ["stopped", "failed"])
async def test_pinned_model_that_has_died_can_be_unpinned(pool: Pool, state: str) -> None:
    publish(fresh=None, there=PublishedModel(state, loads=1, pinned=True))
    await told(pool, order="unpin")
    assert pool.orders == [(PLAIN, "unpin", "there")]


async def test_ordered_load_that_waits_for_room_can_be_taken_back(pool: Pool) -> None:
    publish(fresh=None, there=PublishedModel("stopped", place=1))
    await told(pool, order="unload")
    assert pool.orders == [(PLAIN, "unload", "there")]


@pytest.mark.parametrize("order", ["sleep", "unload", "pin", "unpin"])
@pytest.mark.parametrize("first", [RuntimeError("actor died"), None])
async def test_trouble_of_one_replica_is_told_and_the_others_hear_the_order_all_the_same(
    pool: Pool, order: str, first: Exception | None
) -> None:
    publish(one=PublishedModel("awake"), two=PublishedModel("asleep"))
    refused = {"refused": {"code": "closing", "reason": "its replica is shutting down", "retry_after_s": 2}}
    pool.order_answers += [first or refused, {}]
    call = await told(pool, order=order)
    assert (call.status, call.error["code"]) == (503, "pool_unavailable" if first else "closing")
    assert [only for _, _, only in pool.orders] == ["one", "two"]
