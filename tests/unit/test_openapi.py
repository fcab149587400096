"""serve_app.router.openapi: the document is valid, and what it says of each path is so."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

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
HOT, LAZY = "org/hot:1b", "org/lazy"
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


@contextlib.asynccontextmanager
async def service() -> AsyncIterator[RouterApp]:
    models = [
        {"id": HOT, "tier": "resident", "source": "org/hot", "context": 4096},
        {"id": LAZY, "tier": "lazy", "source": "org/e", "context": 512, "abilities": ["embeddings"]},
    ]
    awake = PublishedModel("awake", phases={"loading": 1.5}, failure="once")
    async with Upstream(answer(200, ANSWER)) as upstream:
        set_replicas("Hot", [Replica("hot-0", {HOT: upstream.url}, SECRET, {HOT: awake}, True)])
        set_replicas("Pool", [Replica("pool-0", {LAZY: upstream.url}, SECRET, {LAZY: awake}, True)])
        settings = Config.model_validate({"models": models, "conversations": {"enabled": True}})
        app = RouterApp(settings, {HOT: "Hot", LAZY: "Pool"}, Pool(), "test")
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
        named = [parameter["name"] for parameter in operation.get("parameters", ())]
        assert named == re.findall(r"{(\w+)}", path)
        assert all(parameter["in"] == "path" and parameter["required"] for parameter in operation.get("parameters", ()))
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


async def test_every_route_is_in_the_document_and_nothing_else() -> None:
    async with service() as app:
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
    "EmbeddingRequest": {"input": ["hi"], "model": LAZY},
}


def body_of(operation: dict[str, Any]) -> dict[str, Any] | None:
    """The example for an operation, right by its schema."""
    if "requestBody" not in operation:
        return None
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    body = BODIES[schema["$ref"].rpartition("/")[2]]
    validator(schema).validate(body)
    return body


@pytest.mark.parametrize(("path", "method", "operation"), OPERATIONS, ids=NAMES)
async def test_every_path_answers_as_the_document_says(path: str, method: str, operation: dict[str, Any]) -> None:
    body = body_of(operation)
    async with service() as app:
        names = [HOT, LAZY] if path == "/v1/models/{id}" else [LAZY]
        if "conversations" in path:
            await Call(app, BODIES["ChatRequest"], headers={"x-session-id": LAZY}).done()
        if path == "/v1/responses/{id}":
            names = [(await Call(app, BODIES["ResponseRequest"], path="/v1/responses").done()).json["id"]]
        for name in names:
            asked = path.replace("{id}", name).replace("{order}", "load")
            call = await Call(app, body or b"", path=asked, method=method.upper()).done()
            content = operation["responses"][str(call.status)]["content"]
            validator(content[call.headers["content-type"]]["schema"]).validate(call.json)
            assert 200 <= call.status < 300


REFUSING = [(path, method) for path, method, operation in OPERATIONS if "requestBody" in operation or "{" in path]


@pytest.mark.parametrize(("path", "method"), REFUSING)
async def test_every_refusal_is_as_the_document_says(path: str, method: str) -> None:
    async with service() as app:
        call = await Call(app, b"{", path=path.replace("{id}", "nope"), method=method.upper()).done()
    assert call.status in (400, 404)
    content = DOCUMENT["paths"][path][method]["responses"]["default"]["content"]
    validator(content["application/json"]["schema"]).validate(call.json)


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
