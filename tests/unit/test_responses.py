"""/v1/responses: what the router reads of a body, what it sends on, and `previous_response_id` over its own store."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import orjson
import pytest
from asgi_call import Call
from catalogs import decided, sent
from openai.types.responses.response_item_list import ResponseItemList
from scripted_pool import SECRET, Pool
from scripted_upstream import DONE, Script, Upstream, answer, stream

from serve_app.config import Config
from serve_app.errors import ApiError
from serve_app.models.replicas import PublishedModel, Replica, set_replicas
from serve_app.router.app import RouterApp
from serve_app.router.tally import Tally
from serve_app.routing.facts import read_facts

PATH = "/v1/responses"
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "sunny"}


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text}
    return {"type": "message", "id": "msg_1", "role": "assistant", "content": [part]}


# What is read


@pytest.mark.parametrize(
    "given",
    ["what is 2+2?", [{"role": "user", "content": [{"type": "input_text", "text": "what is 2+2?"}]}]],
)
def test_input_is_a_string_or_items(given: object) -> None:
    facts = read_facts({"input": given, "instructions": "be kind", "max_output_tokens": 9}, "responses")
    assert facts.excerpt
    assert (facts.last_user_text, facts.excerpt.ask) == ("what is 2+2?", "what is 2+2?")
    assert (facts.excerpt.system, facts.max_tokens) == ("be kind", 9)


def test_a_tool_loop_is_seen_as_one() -> None:
    facts = read_facts({"input": [user("weather?"), CALL, OUTPUT], "tools": [WEATHER]}, "responses")
    assert facts.excerpt
    assert facts.excerpt.in_tool_loop
    assert facts.excerpt.tool_names == ("weather",)


def test_images_and_schemas_are_seen() -> None:
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "https://x/y.png"}]}
    form = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}
    facts = read_facts({"input": [image], "text": form}, "responses")
    assert facts.has_images
    assert facts.json_schema
    assert not read_facts({"input": "x", "text": {"format": {"type": "text"}}}, "responses").json_schema


def test_a_schema_without_end_is_refused_here_too() -> None:
    form = {"format": {"type": "json_schema", "name": "n", "schema": {"$ref": "#"}}}
    with pytest.raises(ApiError, match="refers to itself"):
        read_facts({"input": "x", "text": form}, "responses")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"content": "no role"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0]"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": "x", "instructions": 3}, "instructions"),
        ({"input": "x", "reasoning": "high"}, "reasoning"),
        ({"input": "x", "text": "json"}, "text"),
        ({"input": "x", "tools": {}}, "tools"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "conversation": "c"}, "conversation"),
        ({"input": "x", "reasoning": {"effort": "wild"}}, "reasoning_effort"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        decided(body, "responses")
    assert (caught.value.status, caught.value.param) == (400, param)


# What is decided and sent


@pytest.mark.parametrize(
    ("fields", "thinks", "source"),
    [
        ({"reasoning": {"effort": "high"}}, True, "reasoning_effort"),
        ({"reasoning": {"effort": "none"}}, False, "reasoning_effort"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True, "enable_thinking"),
        ({"mode": "thinking"}, True, "mode"),
        ({"model": "thinker:think"}, True, "profile"),
        ({"input": "2+2? /think"}, True, "soft_switch"),
        ({}, False, "default"),
    ],
)
def test_thinking_is_chosen_as_for_chat_and_sent_as_the_hard_switch(
    fields: dict[str, Any], thinks: bool, source: str
) -> None:
    body = {"model": "thinker", "input": "2+2?", **fields}
    decision = decided(body, "responses")
    assert (decision.thinking, decision.thinking_source) == (thinks, source)
    assert decision.budget is None
    outgoing = sent(body, "responses")
    assert outgoing["chat_template_kwargs"] == {"enable_thinking": thinks}
    assert outgoing["temperature"] == (0.6 if thinks else 0.7)
    assert outgoing.get("reasoning") == fields.get("reasoning")


def test_a_model_that_does_not_chat_answers_no_response() -> None:
    with pytest.raises(ApiError, match="does not do responses"):
        decided({"model": "embedder", "input": "x"}, "responses")


def test_the_engine_keeps_nothing_and_gets_no_id_of_the_clients() -> None:
    outgoing = sent({"input": "x", "store": True, "previous_response_id": "r", "request_id": "mine"}, "responses")
    assert outgoing["store"] is False
    assert not outgoing.keys() & {"previous_response_id", "request_id"}


def test_a_stream_of_responses_counts_its_tokens_anyway_and_is_not_asked_to() -> None:
    assert "stream_options" not in sent({"input": "x", "stream": True}, "responses")


def test_an_answer_in_the_input_may_leave_out_what_only_servers_know() -> None:
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "Oslo."}], "id": None}
    whole = {"type": "message", "id": "msg_x", "status": "completed", "role": "assistant", "content": "Oslo."}
    ask = {"role": "user", "content": [{"type": "input_text", "text": "And Rome?"}]}
    first, *rest = sent({"input": [said, whole, ask]}, "responses")["input"]
    assert rest == [whole, ask]
    assert (first["type"], first["status"], first["id"]) == ("message", "completed", "msg_0")
    assert first["content"] == [{"type": "output_text", "text": "Oslo.", "annotations": []}]


def test_system_items_join_the_instructions_where_every_template_takes_them() -> None:
    items = [{"role": "developer", "content": "b"}, user("x"), {"role": "system", "content": "c"}]
    outgoing = sent({"instructions": "a", "input": items}, "responses")
    assert (outgoing["instructions"], outgoing["input"]) == ("a\n\nb\n\nc", [user("x")])


# Through the router

HOT = "hot"


def response(text: str = "four", status: str = "completed", **fields: Any) -> dict[str, Any]:
    thought = {"type": "reasoning", "id": "rs", "content": [{"type": "reasoning_text", "text": "hm"}]}
    return {
        "id": "resp_1",
        "object": "response",
        "status": status,
        "store": False,
        "previous_response_id": None,
        "output": [thought, said(text)],
        **fields,
    }


def event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"


CREATED = event("response.created", response=response(status="in_progress", output=[]))
DELTA = event("response.output_text.delta", delta="four")
COMPLETED = event("response.completed", response=response())


@pytest.fixture(autouse=True)
def empty_tables() -> Iterator[None]:
    yield
    set_replicas("Hot", [])


@contextlib.asynccontextmanager
async def behind(script: Script, **kept: Any) -> AsyncIterator[tuple[RouterApp, Upstream]]:
    settings: dict[str, Any] = {
        "models": [
            {"id": HOT, "tier": "resident", "source": "org/hot", "context": 4096}
            | {"abilities": ["chat", "tools"], "engine": {"tool_call_parser": "hermes"}}
        ],
        "conversations": {"enabled": True, **kept},
    }
    async with Upstream(script) as upstream:
        set_replicas("Hot", [Replica("hot-0", {HOT: upstream.url}, SECRET, {HOT: PublishedModel("awake")}, True)])
        app = RouterApp(Config.model_validate(settings), {HOT: "Hot"}, Pool(), "test")
        yield app, upstream
        await app._relay.close()


async def ask(app: RouterApp, given: object = "2+2?", **fields: Any) -> Call:
    return await Call(app, {"input": given, **fields}, path=PATH).done()


async def test_a_response_goes_on_from_the_one_before_it() -> None:
    async with behind(answer(200, response())) as (app, upstream):
        first = await ask(app, instructions="only this once")
        assert first.headers["x-router-conversation"] == "new"
        assert first.json == response(store=True)
        second = await ask(app, "and 3+3?", previous_response_id="resp_1")
        assert second.headers["x-router-conversation"] == "kept"
        assert second.json["previous_response_id"] == "resp_1"
        assert int(second.headers["content-length"]) == len(second.body)
        assert second.headers["x-router-model"] == HOT
    asked = upstream.seen[1].body
    assert upstream.seen[1].path == PATH
    assert asked["input"] == [user("2+2?"), said("four"), user("and 3+3?")]
    assert not asked.keys() & {"previous_response_id", "instructions"}


async def test_one_response_can_be_gone_on_with_twice() -> None:
    async with behind(answer(200, response())) as (app, upstream):
        await ask(app)
        upstream.script = answer(200, response(id="resp_2"))
        for text in ("left", "right"):
            await ask(app, text, previous_response_id="resp_1")
        assert [seen.body["input"][2:] for seen in upstream.seen[1:]] == [[user("left")], [user("right")]]


async def test_a_tools_answer_follows_its_call() -> None:
    async with behind(answer(200, response(output=[CALL]))) as (app, upstream):
        await ask(app, "weather?", tools=[WEATHER])
        await ask(app, [OUTPUT], tools=[WEATHER], previous_response_id="resp_1")
    assert upstream.seen[1].body["input"] == [user("weather?"), CALL, OUTPUT]


@pytest.mark.parametrize("size", [7, 10_000])
async def test_a_stream_passes_as_it_is_and_is_kept(size: int) -> None:
    whole = CREATED + DELTA + COMPLETED
    cut = whole + DONE
    pieces = [cut[start : start + size] for start in range(0, len(cut), size)]
    async with behind(stream(*pieces)) as (app, upstream):
        call = await ask(app, stream=True)
        assert (call.status, call.body) == (200, whole)
        assert call.headers["x-router-conversation"] == "new"
        await ask(app, "more", stream=True, previous_response_id="resp_1")
    assert upstream.seen[1].body["input"] == [user("2+2?"), said("four"), user("more")]


async def test_a_response_is_kept_before_the_client_can_know_that_it_is_complete() -> None:
    async with behind(stream(CREATED, COMPLETED, end="stall")) as (app, _):
        call = Call(app, {"input": "x", "stream": True}, path=PATH)
        await call.until(lambda call: COMPLETED in call.body)
        assert (await Call(app, path=PATH + "/resp_1", method="GET").done()).status == 200
        call.disconnect()
        await call.done()


@pytest.mark.parametrize(
    "script",
    [
        stream(CREATED, DELTA, end="cut"),
        stream(CREATED, DELTA),
        stream(CREATED, DELTA, DONE),
        stream(CREATED, event("response.failed", response=response(status="failed")), DONE),
        stream(CREATED, b'data: {"error":{"message":"x","code":500}}\n\n', DONE),
    ],
)
async def test_of_a_stream_that_breaks_off_nothing_is_kept(script: Script) -> None:
    async with behind(script) as (app, _):
        await ask(app, stream=True)
        assert (await Call(app, path=PATH + "/resp_1", method="GET").done()).status == 404


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ],
)
async def test_a_refusal_names_the_field_that_was_written(fields: dict[str, Any], param: str) -> None:
    async with behind(answer(200, response())) as (app, _):
        call = await ask(app, **fields)
        assert (call.status, call.error["param"]) == (400, param)
        assert "`reasoning_effort`" not in call.error["message"]


USAGE = {
    "input_tokens": 7,
    "input_tokens_details": {"cached_tokens": 4},
    "output_tokens": 5,
    "output_tokens_details": {"reasoning_tokens": 3},
    "total_tokens": 12,
}


@pytest.mark.parametrize("streams", [False, True])
def test_tokens_are_counted_as_for_chat(streams: bool) -> None:
    tally, counted = Tally(hides=True), response(usage=USAGE)
    if streams:
        for data in (CREATED, DELTA, event("response.completed", response=counted), DONE):
            assert tally.events(data) == data
    else:
        tally.whole(orjson.dumps(counted))
    assert (tally.prompt, tally.completion, tally.reasoning, tally.cached) == (7, 5, 3, 4)


async def test_store_false_keeps_nothing() -> None:
    async with behind(answer(200, response())) as (app, _):
        call = await ask(app, store=False)
        assert "x-router-conversation" not in call.headers
        assert call.json["store"] is False
        assert (await Call(app, path=PATH + "/resp_1", method="GET").done()).status == 404


async def test_a_response_is_read_and_deleted() -> None:
    async with behind(answer(200, response())) as (app, _):
        await ask(app)
        call = await Call(app, path=PATH + "/resp_1", method="GET").done()
        assert call.json == response(store=True)
        call = await Call(app, path=PATH + "/resp_1", method="DELETE").done()
        assert call.json == {"id": "resp_1", "object": "response", "deleted": True}
        for method in ("GET", "DELETE"):
            call = await Call(app, path=PATH + "/resp_1", method=method).done()
            assert (call.status, call.error["code"]) == (404, "not_found")


async def test_an_unknown_previous_response_is_refused_and_no_engine_asked() -> None:
    async with behind(answer(200, response())) as (app, upstream):
        call = await ask(app, previous_response_id="resp_gone")
        assert (call.status, call.error["code"]) == (400, "previous_response_not_found")
        assert call.headers["x-request-id"]
        assert (await ask(app, previous_response_id=3)).error["param"] == "previous_response_id"
        assert not upstream.seen


async def listed(app: RouterApp, name: str = "resp_1", query: str = "order=asc") -> Call:
    return await Call(app, path=f"{PATH}/{name}/input_items", method="GET", query=query).done()


async def test_input_items_are_all_that_led_to_a_response_and_none_of_its_answer() -> None:
    async with behind(answer(200, response(output=[CALL]))) as (app, upstream):
        await ask(app, "weather?", tools=[WEATHER])
        upstream.script = answer(200, response(id="resp_2"))
        await ask(app, [OUTPUT], tools=[WEATHER], previous_response_id="resp_1")
        (item,) = (await listed(app)).json["data"]
        call = await listed(app, "resp_2")
    assert (item["role"], item["content"]) == ("user", [{"type": "input_text", "text": "weather?"}])
    found = ResponseItemList.model_validate(call.json)
    assert [one.type for one in found.data] == ["message", "function_call", "function_call_output"]
    assert (found.first_id, found.last_id, found.has_more) == (found.data[0].id, found.data[2].id, False)
    assert found.data[0].id == item["id"]
    assert {key: call.json["data"][2][key] for key in OUTPUT} == OUTPUT


async def test_input_items_come_in_pages() -> None:
    async with behind(answer(200, response())) as (app, _):
        await ask(app, [user(text) for text in "abcde"])

        async def texts(query: str) -> tuple[str, bool, str]:
            page = (await listed(app, query=query)).json
            return "".join(one["content"][0]["text"] for one in page["data"]), page["has_more"], page["last_id"]

        assert (await texts(""))[:2] == ("edcba", False)
        assert (await texts("order=asc&limit=5"))[:2] == ("abcde", False)
        *first, last = await texts("limit=2")
        assert first == ["ed", True]
        *rest, last = await texts(f"limit=2&after={last}")
        assert rest == ["cb", True]
        assert (await texts(f"limit=2&after={last}"))[:2] == ("a", False)
        for query, param in (("limit=0", "limit"), ("limit=101", "limit"), ("order=up", "order"), ("after=x", "after")):
            call = await listed(app, query=query)
            assert (call.status, call.error["param"]) == (400, param)


async def test_a_kept_response_cannot_be_cancelled_or_streamed_and_says_why() -> None:
    async with behind(answer(200, response())) as (app, _):
        await ask(app)
        cancelled = await Call(app, path=PATH + "/resp_1/cancel").done()
        assert (cancelled.status, cancelled.error["code"]) == (400, "response_not_cancellable")
        streamed = await Call(app, path=PATH + "/resp_1", query="stream=true", method="GET").done()
        assert (streamed.status, streamed.error["param"]) == (400, "stream")
        assert (await Call(app, path=PATH + "/resp_1", query="stream=false", method="GET").done()).status == 200


async def test_what_is_below_a_response_is_there_for_its_owner_only() -> None:
    async with behind(answer(200, response())) as (app, _):
        await ask(app)
        for path, method in (("/input_items", "GET"), ("/cancel", "POST")):
            for name, headers in (("resp_1", {"authorization": "Bearer other"}), ("resp_x", {})):
                call = await Call(app, path=f"{PATH}/{name}{path}", method=method, headers=headers).done()
                assert (call.status, call.error["code"]) == (404, "not_found")


async def test_background_is_a_400_that_names_what_is_right() -> None:
    async with behind(answer(200, response())) as (app, upstream):
        call = await ask(app, background=True)
        assert (call.status, call.error["param"], call.error["code"]) == (400, "background", "unsupported_value")
        assert "/v1/batches" in call.error["message"]
        assert (await ask(app, background=False)).status == 200
        assert len(upstream.seen) == 1


async def test_a_lost_redis_answers_without_what_was_before() -> None:
    async with behind(answer(200, response()), redis_url="redis://127.0.0.1:1") as (app, upstream):
        call = await ask(app, previous_response_id="resp_1")
        assert (call.status, call.headers["x-router-conversation"]) == (200, "unavailable")
        assert call.json["store"] is False
        call = await Call(app, path=PATH + "/resp_1", method="GET").done()
        assert (call.status, call.error["code"]) == (503, "conversations_unavailable")
    assert upstream.seen[0].body["input"] == [user("2+2?")]


async def test_where_conversations_are_off_responses_answer_and_keep_nothing() -> None:
    async with behind(stream(CREATED, COMPLETED, DONE), enabled=False) as (app, _):
        call = await ask(app, stream=True)
        assert call.body == CREATED + COMPLETED
        assert "x-router-conversation" not in call.headers
        assert (await ask(app, previous_response_id="resp_1")).error["param"] == "previous_response_id"
        assert (await Call(app, path=PATH + "/resp_1", method="GET").done()).status == 404


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"input": 3}', b'{"input": [1]}'])
async def test_what_cannot_be_read_is_a_400(body: bytes) -> None:
    async with behind(answer(200, response())) as (app, _):
        call = await Call(app, body, path=PATH).done()
        assert call.status == 400
        assert call.error["type"] == "invalid_request_error"
