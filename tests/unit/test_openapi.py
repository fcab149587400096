"""serve_app.router.openapi: the document is valid, and what it says of each path is so."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import httpx
import pytest
from asgi_call import Call
from jsonschema import Draft202012Validator
from scripted_pool import SECRET, Pool
from scripted_upstream import Upstream, answer
from starlette.routing import Route

from serve_app.config import Config
from serve_app.errors import ApiError
from serve_app.models.replicas import PublishedModel, Replica, set_replicas
from serve_app.router.app import RouterApp
from serve_app.router.openapi import document
from serve_app.routing.facts import read_facts

DOCUMENT = document(keeps=True)
OPERATIONS = [
    (path, method, operation) for path, methods in DOCUMENT["paths"].items() for method, operation in methods.items()
]
NAMES = [f"{method} {path}" for path, method, _ in OPERATIONS]
HOT, LAZY, JUDGE = "org/hot:1b", "org/lazy", "org/judge"
# As an engine answers a chat, and a request of the Responses API.
ANSWER = {
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}],
    "id": "resp_1",
    "object": "response",
    "status": "completed",
    "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]}],
}


def validator(schema: dict[str, Any]) -> Draft202012Validator:
    """Of a schema that may refer to the document's."""
    return Draft202012Validator({**schema, "components": DOCUMENT["components"]})


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[RouterApp]:
    models = [
        {"id": HOT, "tier": "resident", "source": "org/hot", "context": 4096},
        {"id": LAZY, "tier": "lazy", "source": "org/e", "context": 512, "abilities": ["embeddings"]},
        {"id": JUDGE, "tier": "lazy", "source": "org/j", "context": 512, "abilities": ["score"]},
    ]
    awake = PublishedModel("awake", phases={"loading": 1.5}, failure="once")
    async with Upstream(answer(200, ANSWER)) as upstream:
        set_replicas("Hot", [Replica("hot-0", {HOT: upstream.url}, SECRET, {HOT: awake}, True)])
        lazy = (LAZY, JUDGE)
        awake_there = Replica("pool-0", dict.fromkeys(lazy, upstream.url), SECRET, dict.fromkeys(lazy, awake), True)
        set_replicas("Pool", [awake_there])
        kept = {"conversations": {"enabled": True}, "batches": {"directory": str(tmp_path)}}
        settings = Config.model_validate({"models": models, **kept})
        app = RouterApp(settings, {HOT: "Hot", **dict.fromkeys(lazy, "Pool")}, Pool(), "test")
        yield app
        await app._relay.close()


@pytest.fixture(autouse=True)
def empty_tables() -> Iterator[None]:
    yield
    for deployment in ("Hot", "Pool"):
        set_replicas(deployment, [])


# The document itself


def test_document_has_the_form_of_openapi_3_1() -> None:
    assert re.fullmatch(r"3\.1\.\d+", DOCUMENT["openapi"])
    assert {"title", "version"} <= DOCUMENT["info"].keys()
    assert DOCUMENT.keys() <= {"openapi", "info", "security", "paths", "components"}
    schemes = DOCUMENT["components"]["securitySchemes"]
    assert {name for need in DOCUMENT["security"] for name in need} == set(schemes)
    for path, method, operation in OPERATIONS:
        assert path.startswith("/")
        assert method in ("get", "post", "delete")
        assert operation.keys() <= {"summary", "parameters", "requestBody", "responses", "security"}
        parameters = operation.get("parameters", ())
        in_path = [parameter for parameter in parameters if parameter["in"] == "path"]
        assert [parameter["name"] for parameter in in_path] == re.findall(r"{(\w+)}", path)
        assert all(parameter["required"] for parameter in in_path)
        assert all(parameter in in_path or parameter["in"] == "query" for parameter in parameters)
        for status, response in operation["responses"].items():
            assert re.fullmatch(r"\d{3}|default", status)
            assert response["description"]
            assert all(content.keys() == {"schema"} for content in response["content"].values())


def test_every_schema_is_one_and_every_reference_leads_somewhere_and_none_is_left_over() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    referred = set(re.findall(r"'#/components/schemas/(\w+)'", str(DOCUMENT)))
    assert referred == set(schemas)


async def test_every_route_is_in_the_document_and_nothing_else(app: RouterApp) -> None:
    routes = {
        (re.sub(r"{(name|id):path}", "{id}", route.path), method.lower())
        for route in app._app.routes
        if isinstance(route, Route)
        for method in (route.methods or {"POST"}) - {"HEAD"}
    }
    assert routes == {(path, method) for path, method, _ in OPERATIONS}


def test_keys_are_asked_for_where_the_document_says_so() -> None:
    assert {path for path, _, operation in OPERATIONS if operation.get("security") == []} == {"/health", "/ready"}


# What it says


BODIES: dict[str, dict[str, Any]] = {
    "ChatRequest": {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, "stop": ["a"], "seed": None},
    "CompletionRequest": {"prompt": "hi", "max_tokens": 3, "stop": "a", "n": None},
    "ResponseRequest": {"input": "hi", "instructions": "be brief", "temperature": None, "reasoning": {"effort": "low"}},
    "MessagesRequest": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "max_tokens": 3,
        "thinking": {"type": "enabled", "budget_tokens": 1},
        "stop_sequences": None,
    },
    "CountTokensRequest": {"messages": [{"role": "user", "content": "hi"}], "system": "be brief"},
    "EmbeddingRequest": {"input": ["hi"], "model": LAZY},
    "TokenizeRequest": {"messages": [{"role": "user", "content": "hi"}], "model": LAZY},
    "DetokenizeRequest": {"tokens": [1, 2], "model": None},
    "ScoreRequest": {"text_1": "hi", "text_2": ["ho", "hum"]},
    "RerankRequest": {"query": "hi", "documents": ["ho", "hum"], "model": JUDGE},
    "FileUpload": {"file": "{}", "purpose": "batch", "expires_after[seconds]": 3600},
    "BatchRequest": {
        "input_file_id": "file-0",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        "metadata": {"team": "x"},
    },
}


async def asked(app: RouterApp, path: str, method: str, **more: Any) -> Call:
    """One operation, with the example of its body, right by its schema."""
    content = DOCUMENT["paths"][path][method].get("requestBody", {"content": {}})["content"]
    body: Any = b""
    headers: dict[str, str] = {}
    for kind, of_kind in content.items():
        body = BODIES[of_kind["schema"]["$ref"].rpartition("/")[2]] | more.get("fields", {})
        validator(of_kind["schema"]).validate(body)
        if kind == "multipart/form-data":
            fields = {name: str(value) for name, value in body.items() if name != "file"}
            form = httpx.Request("POST", "http://router", data=fields, files={"file": ("in.jsonl", body["file"])})
            body, headers = form.read(), {"content-type": form.headers["content-type"]}
    filled = re.sub(r"{(id|file_id|batch_id)}", more.get("name", LAZY), path).replace("{order}", "load")
    # The feed does not end by itself.
    query = "once=true" if path == "/v1/router/events" else ""
    return await Call(app, body, path=filled, query=query, method=method.upper(), headers=headers).done()


async def names_for(app: RouterApp, path: str) -> list[str]:
    """What there is to ask a path for."""
    if path == "/v1/models/{id}":
        return [HOT, LAZY]
    if "conversations" in path:
        await Call(app, BODIES["ChatRequest"], headers={"x-session-id": LAZY}).done()
    for begins, made_by in (("/v1/responses/", "/v1/responses"), ("/v1/files/", "/v1/files")):
        if path.startswith(begins):
            return [(await asked(app, made_by, "post")).json["id"]]
    if path.startswith("/v1/batches"):
        file = (await asked(app, "/v1/files", "post")).json["id"]
        batch = (await asked(app, "/v1/batches", "post", fields={"input_file_id": file})).json["id"]
        return [batch if "{" in path else file]
    return [LAZY]


@pytest.mark.parametrize(("path", "method", "operation"), OPERATIONS, ids=NAMES)
async def test_every_path_answers_as_the_document_says(
    app: RouterApp, path: str, method: str, operation: dict[str, Any]
) -> None:
    for name in await names_for(app, path):
        fields = {"input_file_id": name} if path == "/v1/batches" else {}
        call = await asked(app, path, method, name=name, fields=fields)
        assert str(call.status) in operation["responses"]
        kind = call.headers["content-type"]
        said = call.json if kind == "application/json" else call.body.decode()
        validator(operation["responses"][str(call.status)]["content"][kind]["schema"]).validate(said)


REFUSING = [(path, method) for path, method, operation in OPERATIONS if "requestBody" in operation or "{" in path]


@pytest.mark.parametrize(("path", "method"), REFUSING)
async def test_every_refusal_is_as_the_document_says(app: RouterApp, path: str, method: str) -> None:
    filled = re.sub(r"{(id|file_id|batch_id)}", "nope", path)
    call = await Call(app, b"{", path=filled, method=method.upper()).done()
    assert call.status in (400, 404)
    content = DOCUMENT["paths"][path][method]["responses"]["default"]["content"]
    validator(content["application/json"]["schema"]).validate(call.json)


QUERIES = [
    ("/v1/files", "limit=10000&order=asc&purpose=batch&after=file-0", 200),
    ("/v1/files", "limit=10001", 400),
    ("/v1/files", "order=newest", 400),
    ("/v1/batches", "limit=100&after=batch_0", 200),
    ("/v1/batches", "limit=101", 400),
    ("/v1/batches", "limit=0", 400),
]


@pytest.mark.parametrize(("path", "query", "status"), QUERIES)
async def test_lists_take_the_queries_of_the_document(app: RouterApp, path: str, query: str, status: int) -> None:
    schemas = {parameter["name"]: parameter["schema"] for parameter in DOCUMENT["paths"][path]["get"]["parameters"]}
    given = {name: int(value) if value.isdigit() else value for name, value in parse_qsl(query)}
    assert all(validator(schemas[name]).is_valid(value) for name, value in given.items()) == (status == 200)
    assert (await Call(app, path=path, query=query, method="GET").done()).status == status


WRONG: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": "hi"},
    {"messages": [{"content": "no role"}]},
    {"messages": [{"role": "user", "content": 3}]},
    {"temperature": 3},
    {"top_p": "all"},
    {"n": 129},
    {"max_tokens": 0},
    {"max_completion_tokens": 1.5},
    {"stream": "yes"},
    {"stop": 3},
    {"tools": {}},
    {"response_format": "json"},
    {"user": 1},
]


@pytest.mark.parametrize("fields", WRONG, ids=str)
def test_what_is_wrong_by_the_document_is_refused(fields: dict[str, Any]) -> None:
    wrong = BODIES["ChatRequest"] | fields
    assert not validator({"$ref": "#/components/schemas/ChatRequest"}).is_valid(wrong)
    with pytest.raises(ApiError) as refused:
        read_facts(wrong, "chat")
    assert refused.value.status == 400


CHAT = DOCUMENT["components"]["schemas"]["ChatRequest"]


@pytest.mark.parametrize("name", sorted(CHAT["properties"].keys() - set(CHAT["required"])))
def test_null_is_taken_for_every_field_that_may_be_left_out(name: str) -> None:
    body = BODIES["ChatRequest"] | {name: None}
    assert validator(CHAT).is_valid(body)
    read_facts(body, "chat")
