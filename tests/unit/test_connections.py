"""Field cases of connections: clients that leave and retry, idle ones, odd heads, and Routers that are alike."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest
from front import body, until
from front_door import CHAT, Connection, Door, connected, front_doors, request
from relayed import refuses
from scripted_upstream import DONE, answer, event, silent, stream

from serve_app.service_schema import RouterSettings

ONE_PLACE = {"max_ongoing_requests": 1, "queue": {"size": 200, "wait_s": 60}}
OK = answer(200, {"id": "ok", "choices": []})


@pytest.mark.case(59)
async def test_clients_that_give_up_and_come_again_never_pile_up() -> None:
    """All places are taken. Of 50 clients with three retries none waits twice, and none starts after it has left."""
    most = 0

    async def impatient(client: httpx.AsyncClient, door: Door) -> None:
        nonlocal most
        for _ in range(4):
            with pytest.raises(httpx.ReadTimeout):
                await client.post(door.base_url + CHAT, json=body(), timeout=httpx.Timeout(5, read=0.3))
            most = max(most, door.open)

    async with front_doors(refuses("full"), model=ONE_PLACE) as ((door,), (upstream,)):
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, trust_env=False) as client:
            await asyncio.gather(*(impatient(client, door) for _ in range(50)))
        # Left behind, they would be 200. What just left is noticed a moment later.
        assert most <= 60
        await until(door.idle, "nobody waits")
        upstream.script = OK
        async with connected(door) as connection:
            # The first one's answer comes after the engine has seen all that was on its way.
            await connection.send(request(body()))
            assert (await connection.answer())[0] == 200
            tries = len(upstream.seen)
            await connection.send(request(body()))
            assert (await connection.answer())[0] == 200
        assert len(upstream.seen) == tries + 1


@pytest.mark.case(107)
async def test_every_router_answers_or_closes_every_socket_and_forgets_who_left() -> None:
    async def asks(door: Door, number: int) -> int | None:
        async with connected(door) as connection:
            await connection.send(request(body(stream=number % 2 == 0)))
            if number % 5 == 0:
                connection.leave()
                return None
            return (await connection.answer())[0]

    async with front_doors(stream(event("a"), DONE), count=3, model={"queue": {"size": 30}}) as (doors, _):
        answers = [await asyncio.gather(*(asks(door, number) for number in range(30))) for door in doors]
        # A stream's bytes are no answer to those who wanted a whole one; an error is an answer, too.
        for statuses in answers:
            assert [status for status in statuses if status is None] == [None] * 6
            assert set(statuses) - {None} <= {200, 503}
            assert statuses.count(200) >= 12
        for door in doors:
            await until(door.idle, "nothing is in flight")


@pytest.mark.case(107)
async def test_the_limits_of_a_model_stand_on_its_card_on_every_router() -> None:
    model = {"max_ongoing_requests": 7, "queue": {"size": 11}}
    async with front_doors(OK, count=2, model=model) as (doors, _), httpx.AsyncClient(trust_env=False) as client:
        for door in doors:
            card = (await client.get(door.base_url + "/v1/models/hot")).json()
            assert (card["max_ongoing_requests"], card["max_queued_requests"]) == (7, 11)


@pytest.mark.case(125)
def test_connections_are_kept_longer_than_common_balancers_keep_theirs() -> None:
    # AWS 60 s, Azure 240 s, GCP 600 s.
    assert RouterSettings().keep_alive_s > 600


@pytest.mark.case(125)
async def test_an_idle_connection_is_used_again_and_in_the_end_closed_cleanly() -> None:
    async def used_again(door: Door, connection: Connection, idle_s: float) -> None:
        await connection.send(request(body()))
        assert (await connection.answer())[0] == 200
        await asyncio.sleep(idle_s)  # not a wait for a state: the time is what is tried
        await connection.send(request(body()))
        assert (await connection.answer())[0] == 200

    async with front_doors(OK, router={"keep_alive_s": 2}) as ((door,), _), connected(door) as connection:
        await used_again(door, connection, 1)
        assert await connection.ended()


@pytest.mark.case(140)
@pytest.mark.parametrize(("target", "status"), [(CHAT, 405), ("/", 404), ("/v1/models", 200)])
async def test_a_websocket_is_answered_as_http_and_may_end_abruptly(
    target: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    wish = (
        b"GET %s HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n" % target.encode()
        + b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
    )
    async with front_doors(OK) as ((door,), _):
        with caplog.at_level(logging.WARNING):
            async with connected(door) as connection:
                await connection.send(wish)
                assert (await connection.answer())[0] == status
                await connection.send(wish)
                connection.leave()
            async with connected(door) as another:
                # Half a frame of a protocol that was never agreed on.
                await another.send(wish, b"\x81\x85\x37\xfa")
                another.leave()
            await until(door.idle, "nothing is in flight")
        ours = [record for record in caplog.records if record.name.split(".")[0] in ("serve_app", "uvicorn")]
        assert [record.getMessage() for record in ours] == []


@pytest.mark.case(118)
@pytest.mark.parametrize(
    "lines",
    [
        (b"accept-encoding: br",),
        (b"connection: close",),
        (b"host: evil.example:99",),
        (b"te: trailers", b"via: 1.0 fred"),
        (b"content-encoding: identity",),
    ],
    ids=lambda lines: lines[0].decode(),
)
async def test_what_a_client_says_to_its_proxies_reaches_no_engine_and_changes_nothing(
    lines: tuple[bytes, ...],
) -> None:
    async with front_doors(OK) as ((door,), (upstream,)), connected(door) as connection:
        await connection.send(request(body(), *lines))
        status, headers, answered = await connection.answer()
        assert (status, json.loads(answered)["id"]) == (200, "ok")
        assert "content-encoding" not in headers
        _only_listed(upstream.seen[0].headers, door)


@pytest.mark.case(118)
async def test_a_chunked_or_announced_body_arrives_whole_with_its_own_length() -> None:
    raw = json.dumps(body("Grüße, 世界 🚀")).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    pieces = [raw[start : start + 7] for start in range(0, len(raw), 7)]
    chunked = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces] + [b"0\r\n\r\n"]
    async with front_doors(OK) as ((door,), (upstream,)), connected(door) as connection:
        await connection.send(head + b"transfer-encoding: chunked\r\n\r\n", *chunked)
        assert (await connection.answer())[0] == 200
        await connection.send(head + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(raw))
        assert (await connection.answer())[0] == 100
        await connection.send(raw)
        assert (await connection.answer())[0] == 200
        for seen in upstream.seen:
            assert seen.body["messages"][0]["content"] == "Grüße, 世界 🚀"
            _only_listed(seen.headers, door)


def _only_listed(headers: dict[str, Any], door: Door) -> None:
    """What a Router says to an engine, and no word of the client's."""
    assert str(door.port) not in headers["host"]
    known = {"host", "x-switchyard-secret", "x-request-id", "content-type", "content-length", "accept", "user-agent"}
    assert set(headers) <= known | {"accept-encoding", "traceparent", "tracestate"}
    assert "br" not in headers.get("accept-encoding", "").split(", ")


# Beyond the collection's cases


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("HEAD", "/v1/models", 200),
        ("HEAD", "/health", 200),
        ("HEAD", CHAT, 405),
        ("OPTIONS", CHAT, 405),
        ("GET", "/v1/models/org%2Fhot", 200),
        ("GET", "/v1/models?limit=20", 200),
        ("GET", "http://other.example/v1/models", 200),
        ("TRACE", "/v1/models", 405),
    ],
)
async def test_methods_and_targets_that_clients_and_proxies_send(method: str, target: str, status: int) -> None:
    async with front_doors(OK, model={"aliases": ["org/hot"]}) as ((door,), _), connected(door) as connection:
        await connection.send(f"{method} {target} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        head = (await connection.reader.readuntil(b"\r\n\r\n")).decode()
        assert int(head.split()[1]) == status


async def test_a_stream_has_no_length_and_may_not_be_kept_by_anybody_between() -> None:
    async with front_doors(stream(event("a"), event("b"), DONE)) as ((door,), _), connected(door) as connection:
        await connection.send(request(body(stream=True)))
        status, headers, said = await connection.answer()
        assert (status, said) == (200, event("a") + event("b") + DONE)
        assert headers["transfer-encoding"] == "chunked"
        assert "content-length" not in headers
        assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")


async def test_a_body_that_grows_with_its_models_name_has_its_new_length() -> None:
    async with front_doors(OK, model={"aliases": ["a", "a" * 200]}) as ((door,), (upstream,)):
        for name in ("a", "a" * 200):
            async with connected(door) as connection:
                await connection.send(request(body(model=name)))
                assert (await connection.answer())[0] == 200
        assert [seen.body["model"] for seen in upstream.seen] == ["hot", "hot"]


async def test_the_last_of_equal_keys_counts() -> None:
    twice = b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": "x", "max_tokens": 5}'
    async with front_doors(OK) as ((door,), (upstream,)), connected(door) as connection:
        await connection.send(request(twice))
        assert (await connection.answer())[0] == 200
        assert upstream.seen[0].body["max_tokens"] == 5


@pytest.mark.parametrize("target", ["//v1/chat/completions", "/v1//chat/completions/", "/v1/chat/completions/?a=b"])
async def test_a_slash_too_many_is_the_same_path_and_no_redirect(target: str) -> None:
    async with front_doors(OK) as ((door,), (engine,)), connected(door) as client:
        await client.send(request(body("slash"), target=target))
        assert (await client.answer())[0] == 200
        assert engine.seen[0].body["messages"] == body("slash")["messages"]


@pytest.mark.parametrize(
    "target", ["/v1/v1/chat/completions", "/v1/router/conversations/a//b", "//", "/v1/models//hot/"]
)
async def test_no_other_path_is_taken_for_one_of_ours(target: str) -> None:
    async with front_doors(OK) as ((door,), _), connected(door) as client:
        await client.send(request(b"", target=target, method="GET"))
        assert (await client.answer())[0] == 404


async def test_a_mark_of_byte_order_before_the_body_is_passed_over() -> None:
    async with front_doors(OK) as ((door,), (engine,)), connected(door) as client:
        await client.send(request(b"\xef\xbb\xbf" + json.dumps(body("marked")).encode()))
        assert (await client.answer())[0] == 200
        assert engine.seen[0].body["messages"] == body("marked")["messages"]


async def test_a_query_string_changes_nothing() -> None:
    async with front_doors(OK) as ((door,), (upstream,)), connected(door) as connection:
        await connection.send(request(body(), target=CHAT + "?api-version=2024-10-21"))
        assert (await connection.answer())[0] == 200
        assert upstream.seen[0].path == CHAT


async def test_a_client_that_leaves_in_its_body_or_before_the_answer_leaves_nothing_behind() -> None:
    async with front_doors(silent) as ((door,), (upstream,)):
        whole = request(body())
        for sent in (whole[:20], whole[:-5], whole):
            async with connected(door) as connection:
                await connection.send(sent)
                connection.leave()
            await until(door.idle, "nothing is in flight")
        await until(lambda: all(seen.closed.is_set() for seen in upstream.seen), "the engine's connections are closed")
