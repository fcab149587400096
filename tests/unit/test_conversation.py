"""serve_app.router.conversation: chats whose history the router keeps, as clients and engines see them."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import orjson
import pytest
from asgi_call import Call
from redis_server import redis_server
from scripted_pool import SECRET, Pool
from scripted_upstream import DONE, Script, Upstream, answer, event, hang_up, stream

from serve_app.config import Config
from serve_app.models.replicas import PublishedModel, Replica, set_replicas
from serve_app.router.app import RouterApp

HOT = "hot"
HEADER = "x-router-conversation"
SYSTEM = {"role": "system", "content": "be kind"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calling(call_id: str = "a") -> dict[str, Any]:
    function = {"name": "weather", "arguments": "{}"}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def result(call_id: str = "a") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "sunny"}


def completion(message: dict[str, Any], finish: str = "stop") -> Script:
    return answer(200, {"id": "x", "choices": [{"index": 0, "message": message, "finish_reason": finish}]})


def finish(reason: str = "stop") -> bytes:
    return b"data: " + orjson.dumps({"choices": [{"delta": {}, "finish_reason": reason}]}) + b"\n\n"


@pytest.fixture(autouse=True)
def empty_tables() -> Iterator[None]:
    yield
    set_replicas("Hot", [])


@contextlib.asynccontextmanager
async def behind(
    script: Script = completion(said("hello")),  # noqa: B008 scripts hold nothing
    *,
    context: int = 4096,
    keys: tuple[str, ...] = (),
    router: dict[str, Any] | None = None,
    **kept: Any,
) -> AsyncIterator[tuple[RouterApp, Upstream]]:
    """A router that keeps conversations, with one engine. `keys`: ids of API keys, which are called the same."""
    settings = {
        "models": [{"id": HOT, "tier": "resident", "source": "org/hot", "context": context}],
        "router": router or {},
        "security": {"keys": [{"id": key, "sha256": hashlib.sha256(key.encode()).hexdigest()} for key in keys]},
        "conversations": {"enabled": True, **kept},
    }
    async with Upstream(script) as upstream:
        set_replicas("Hot", [Replica("hot-0", {HOT: upstream.url}, SECRET, {HOT: PublishedModel("awake")}, True)])
        app = RouterApp(Config.model_validate(settings), {HOT: "Hot"}, Pool(), "test")
        yield app, upstream
        await app._relay.close()


async def say(app: RouterApp, *messages: dict[str, Any], session: str = "s", key: str = "", **fields: Any) -> Call:
    headers = ({"x-session-id": session} if session else {}) | ({"authorization": f"Bearer {key}"} if key else {})
    return await Call(app, {"messages": list(messages), **fields}, headers=headers).done()


async def conversation(app: RouterApp, name: str = "s", method: str = "GET", key: str = "") -> Call:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return await Call(app, path=f"/v1/router/conversations/{name}", method=method, headers=headers).done()


def asked(upstream: Upstream) -> list[dict[str, Any]]:
    """The messages of the last request to the engine."""
    return list(upstream.seen[-1].body["messages"])


# History


async def test_a_second_turn_is_answered_with_the_first_before_it() -> None:
    async with behind() as (app, upstream):
        first = await say(app, user("hi"))
        second = await say(app, user("again"))
        assert [call.headers[HEADER] for call in (first, second)] == ["new", "kept"]
        assert asked(upstream) == [user("hi"), said("hello"), user("again")]
        assert second.json["choices"][0]["message"] == said("hello")
        assert int(second.headers["content-length"]) == len(second.body)


@pytest.mark.parametrize("named", ["s", {"id": "s"}])
async def test_the_field_of_the_body_names_the_same_conversation_as_the_header(named: object) -> None:
    async with behind() as (app, upstream):
        await say(app, user("hi"), session="", conversation=named)
        await say(app, user("again"))
        assert len(asked(upstream)) == 3
        assert "conversation" not in upstream.seen[0].body


@pytest.mark.parametrize("size", [5, 10_000])
async def test_a_stream_is_kept_like_a_plain_answer_and_passes_byte_for_byte(size: int) -> None:
    whole = event("Hé") + event("llo") + finish() + DONE
    pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
    async with behind(stream(*pieces)) as (app, upstream):
        first = await say(app, user("hi"), stream=True)
        assert first.body == whole
        assert first.headers[HEADER] == "new"
        assert (await say(app, user("again"), stream=True)).headers[HEADER] == "kept"
        assert asked(upstream) == [user("hi"), said("Héllo"), user("again")]


async def test_a_turn_is_kept_before_the_client_can_know_that_it_has_ended() -> None:
    async with behind(stream(event("x"), finish(), DONE, end="stall")) as (app, _):
        call = Call(app, {"messages": [user("hi")], "stream": True}, headers={"x-session-id": "s"})
        await call.until(lambda call: DONE in call.body)
        assert (await conversation(app)).json["turns"] == 1
        call.disconnect()
        await call.done()


@pytest.mark.parametrize(
    "script",
    [
        stream(event("x"), end="cut"),
        stream(event("x"), finish()),
        stream(event("x"), DONE),
        stream(event("x"), b'data: {"error":{"message":"x","code":500}}\n\n', DONE),
        stream(event("x"), finish("content_filter"), DONE),
    ],
)
async def test_of_a_stream_that_breaks_off_nothing_is_kept(script: Script) -> None:
    async with behind(script) as (app, _):
        await say(app, user("hi"), stream=True)
        assert (await conversation(app)).status == 404


@pytest.mark.parametrize("script", [hang_up, answer(400, {"error": {"message": "no"}}), answer(500, b"")])
async def test_of_a_failed_request_nothing_is_kept_and_the_error_is_the_same(script: Script) -> None:
    async with behind(script) as (app, _):
        named, plain = await say(app, user("hi")), await say(app, user("hi"), session="")
        assert (named.status, named.json) == (plain.status, plain.json)
        assert named.headers[HEADER] == "new"
        assert (await conversation(app)).status == 404


async def test_a_client_that_leaves_in_the_middle_leaves_nothing() -> None:
    async with behind(stream(event("x"), end="stall")) as (app, _):
        call = Call(app, {"messages": [user("hi")], "stream": True}, headers={"x-session-id": "s"})
        await call.until(lambda call: b"x" in call.body)
        call.disconnect()
        await call.done()
        assert (await conversation(app)).status == 404


async def test_requests_of_one_conversation_at_once_lose_no_turn() -> None:
    async with behind() as (app, _):
        await asyncio.gather(*(say(app, user(f"{number}")) for number in range(10)))
        messages = (await conversation(app)).json["messages"]
        assert sorted(each["content"] for each in messages if each["role"] == "user") == list("0123456789")
        assert [each["role"] for each in messages] == ["user", "assistant"] * 10


async def test_a_tool_loop_sends_only_the_tools_answers() -> None:
    async with behind(completion(calling(), "tool_calls")) as (app, upstream):
        await say(app, user("weather?"))
        upstream.script = completion(said("it is sunny"))
        await say(app, result())
        assert asked(upstream) == [user("weather?"), calling(), result()]
        await say(app, user("thanks"))
        assert asked(upstream) == [user("weather?"), calling(), result(), said("it is sunny"), user("thanks")]
        assert (await conversation(app)).json["turns"] == 2


async def test_tool_answers_to_nothing_known_pass_and_are_not_kept() -> None:
    async with behind() as (app, upstream):
        await say(app, user("hi"))
        await say(app, result("unknown"))
        assert asked(upstream)[-1] == result("unknown")
        assert (await conversation(app)).json["turns"] == 1


async def test_reasoning_is_not_replayed() -> None:
    async with behind(completion({**said("4"), "reasoning": "hm", "reasoning_content": "hm"})) as (app, upstream):
        await say(app, user("2+2?"))
        await say(app, user("and 3+3?"))
        assert asked(upstream)[1] == said("4")


async def test_the_system_message_is_kept_until_another_is_given() -> None:
    other = {"role": "system", "content": "be brief"}
    async with behind(max_tokens=1) as (app, upstream):
        await say(app, SYSTEM, user("hi"))
        await say(app, user("again"))
        assert asked(upstream) == [SYSTEM, user("again")]
        await say(app, other, user("and again"))
        await say(app, user("last"))
        assert asked(upstream) == [other, user("last")]


async def test_what_has_no_room_goes_from_the_oldest_and_a_header_says_so() -> None:
    async with behind(max_tokens=60) as (app, upstream):
        for number in range(5):
            call = await say(app, user(f"{number} " + "word " * 10))
        # What was already dropped from the store is not counted; what did not fit beside this request is.
        assert asked(upstream)[-3]["content"].startswith("3")
        assert len(asked(upstream)) == 3
        assert call.headers["x-router-conversation-dropped"] == "1"


async def test_a_small_context_leaves_room_for_the_answer() -> None:
    async with behind(context=200) as (app, upstream):
        for number in range(6):
            call = await say(app, user(f"{number} " + "word " * 20), max_tokens=50)
            assert call.status == 200
        assert len(asked(upstream)) < 6


async def test_history_never_makes_a_body_too_large() -> None:
    async with behind(router={"max_body_bytes": 4096}, context=100_000) as (app, upstream):
        for number in range(4):
            assert (await say(app, user(f"{number}" + "x" * 3000))).status == 200
        assert len(asked(upstream)) == 1


async def test_store_false_keeps_a_turn_out() -> None:
    async with behind() as (app, upstream):
        await say(app, user("hi"))
        await say(app, user("secret"), store=False)
        assert len(asked(upstream)) == 3
        assert (await conversation(app)).json["turns"] == 1


# Who is left alone


@pytest.mark.parametrize("messages", [[user("hi"), said("ho"), user("on")], [user("a"), user("b")]])
async def test_a_client_that_sends_everything_is_given_nothing(messages: list[dict[str, Any]]) -> None:
    async with behind() as (app, upstream):
        await say(app, user("hi"))
        call = await say(app, *messages)
        assert call.headers[HEADER] == "own-history"
        assert asked(upstream) == messages
        assert (await conversation(app)).json["turns"] == 1


@pytest.mark.parametrize("streams", [False, True])
async def test_a_request_without_a_name_passes_untouched(streams: bool) -> None:
    async with behind(stream(event("x"), finish(), DONE) if streams else completion(said("x"))) as (app, _):
        call = await say(app, user("hi"), session="", stream=streams)
        assert call.status == 200
        assert HEADER not in call.headers


async def test_it_is_off_unless_configured() -> None:
    async with behind(enabled=False) as (app, upstream):
        for _ in range(2):
            assert HEADER not in (await say(app, user("hi"))).headers
        assert asked(upstream) == [user("hi")]
        assert (await conversation(app)).status == 404


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"messages": 3}', b'{"messages": [3], "conversation": "s"}', b'{"messages": []}']
)
async def test_what_cannot_be_read_is_the_same_400_as_ever(body: bytes) -> None:
    async with behind() as (app, _):
        named = await Call(app, body, headers={"x-session-id": "s"}).done()
        plain = await Call(app, body).done()
        assert (named.status, named.json) == (400, plain.json)


async def test_a_body_that_is_too_large_is_refused_with_a_request_id() -> None:
    async with behind(router={"max_body_bytes": 1024}) as (app, _):
        call = await Call(app, b"x" * 2000, headers={"x-request-id": "mine"}).done()
        assert (call.status, call.headers["x-request-id"]) == (413, "mine")


# Whose it is


async def test_another_key_neither_continues_reads_nor_deletes_it() -> None:
    async with behind(keys=("key-a", "key-b")) as (app, upstream):
        await say(app, user("hi"), key="key-a")
        assert (await say(app, user("hi"), key="key-b")).headers[HEADER] == "new"
        assert asked(upstream) == [user("hi")]
        assert (await conversation(app, method="DELETE", key="key-b")).status == 200
        assert (await conversation(app, method="DELETE", key="key-b")).status == 404
        assert (await conversation(app, key="key-b")).status == 404
        assert (await conversation(app, key="key-a")).json["messages"] == [user("hi"), said("hello")]


async def test_without_keys_callers_are_apart_by_what_they_send() -> None:
    async with behind() as (app, _):
        await say(app, user("hi"), key="mine")
        assert (await conversation(app, key="mine")).status == 200
        assert (await conversation(app, key="yours")).status == 404
        assert (await conversation(app)).status == 404


async def test_a_conversation_is_read_and_deleted() -> None:
    async with behind() as (app, _):
        await say(app, SYSTEM, user("hi"), session="a/b")
        call = await conversation(app, "a/b")
        assert call.json["messages"] == [SYSTEM, user("hi"), said("hello")]
        assert (call.json["id"], call.json["object"], call.json["turns"]) == ("a/b", "conversation", 1)
        assert (await conversation(app, "a/b", "DELETE")).json["deleted"] is True
        for method in ("GET", "DELETE"):
            call = await conversation(app, "a/b", method)
            assert (call.status, call.error["code"]) == (404, "not_found")
        assert (await say(app, user("hi"), session="a/b")).headers[HEADER] == "new"


# Redis


async def test_a_lost_redis_never_fails_a_chat_and_comes_back() -> None:
    with redis_server() as server:
        async with behind(redis_url=server.url) as (app, upstream):
            await say(app, user("hi"))
            assert (await say(app, user("again"))).headers[HEADER] == "kept"
            server.kill()
            for streams in (False, True):
                upstream.script = stream(event("x"), finish(), DONE) if streams else completion(said("hello"))
                call = await say(app, user("and now?"), stream=streams)
                assert (call.status, call.headers[HEADER]) == (200, "unavailable")
                assert asked(upstream) == [user("and now?")]
            lost = await conversation(app)
            assert (lost.status, lost.error["code"]) == (503, "conversations_unavailable")
            server.start()
            await asyncio.sleep(1.1)
            upstream.script = completion(said("hello"))
            assert (await say(app, user("hi"))).headers[HEADER] == "new"
            assert (await say(app, user("again"))).headers[HEADER] == "kept"
            assert app._store
            await app._store.close()


async def test_a_redis_that_is_lost_while_the_engine_answers_is_said() -> None:
    with redis_server() as server:

        async def kills(writer: asyncio.StreamWriter) -> None:
            server.kill()
            await completion(said("hello"))(writer)

        async with behind(kills, redis_url=server.url) as (app, _):
            call = await say(app, user("hi"))
            assert (call.status, call.headers[HEADER]) == (200, "unavailable")


async def test_a_stream_whose_turn_could_not_be_kept_says_so_before_its_end() -> None:
    """Its headers were sent when Redis was still there."""
    with redis_server() as server:

        async def kills(writer: asyncio.StreamWriter) -> None:
            server.kill()
            await stream(event("x"), finish(), DONE)(writer)

        async with behind(kills, redis_url=server.url) as (app, _):
            call = await say(app, user("hi"), stream=True)
            assert (call.status, call.headers[HEADER]) == (200, "new")
            assert b": x-router-conversation: unavailable\n\n" in call.body
            assert call.body.index(b": x-router") < call.body.index(DONE)


async def test_two_routers_continue_each_others_conversations() -> None:
    with redis_server() as server:
        async with behind(redis_url=server.url) as (one, _), behind(redis_url=server.url) as (two, upstream):
            await say(one, user("hi"))
            assert (await say(two, user("again"))).headers[HEADER] == "kept"
            assert asked(upstream) == [user("hi"), said("hello"), user("again")]
            for app in (one, two):
                assert app._store
                await app._store.close()
