"""`GET /openapi.json`: what the front door answers, as an OpenAPI 3.1 document. Written by hand; a test holds it true.

Bodies name the fields that the router itself reads or checks; all others pass on to the engine.
"""

from __future__ import annotations

from typing import Any

from serve_app.residency.events import Order

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_COUNT: Schema = {"type": "integer", "minimum": 1}
_SIZE: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_TEXTS: Schema = {"type": ["string", "array"]}
_EFFORTS = ["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _or_null(schema: Schema) -> Schema:
    kind = schema["type"]
    return {**schema, "type": [*([kind] if isinstance(kind, str) else kind), "null"]}


def _object(required: list[str], **properties: Schema) -> Schema:
    """Fields that may be left out may be null too, as in OpenAI's API."""
    shown = {
        name: schema if name in required or "type" not in schema else _or_null(schema)
        for name, schema in properties.items()
    }
    return {"type": "object", "required": required, "properties": shown}


def _number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


_SAMPLING: dict[str, Schema] = {
    "model": {**_TEXT, "description": "An id or alias of /v1/models; `auto`, or nothing, lets the router choose."},
    "stream": _FLAG,
    "stream_options": {"type": "object"},
    "max_tokens": _COUNT,
    "temperature": _number(0, 2),
    "top_p": _number(0, 1),
    "n": {**_COUNT, "maximum": 128},
    "seed": {"type": "integer"},
    "stop": _TEXTS,
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "user": _TEXT,
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {"role": _TEXT, "content": {"type": ["string", "array", "null"]}},
}
_SCHEMAS: dict[str, Schema] = {
    "ChatRequest": _object(
        ["messages"],
        messages={"type": "array", "minItems": 1, "items": _MESSAGE},
        **_SAMPLING,
        max_completion_tokens=_COUNT,
        tools={"type": "array"},
        tool_choice={"type": ["string", "object"]},
        response_format={"type": "object"},
        reasoning_effort={**_TEXT, "description": f"How much to think: {', '.join(_EFFORTS)}."},
        mode={**_TEXT, "description": "`thinking` or `non-thinking`, whatever the router would choose."},
        conversation={"type": ["string", "object"], "description": "Keeps its model from one request to the next."},
    ),
    "CompletionRequest": _object(["prompt"], prompt=_TEXTS, **_SAMPLING),
    "EmbeddingRequest": _object(["input"], input=_TEXTS, model=_SAMPLING["model"], user=_TEXT),
    "ResponseRequest": _object(
        ["input"],
        input=_TEXTS,
        instructions=_TEXT,
        reasoning={"type": "object"},
        text={"type": "object"},
        max_output_tokens=_COUNT,
        previous_response_id=_TEXT,
        store=_FLAG,
        **{name: _SAMPLING[name] for name in ("model", "stream", "temperature", "top_p", "user")},
        tools={"type": "array"},
    ),
    "Conversation": _object(
        ["id", "object", "turns", "tokens", "messages"],
        id=_TEXT,
        object={"const": "conversation"},
        turns=_SIZE,
        tokens=_SIZE,
        messages={"type": "array", "items": {"type": "object"}},
    ),
    "Deleted": _object(["id", "object", "deleted"], id=_TEXT, object=_TEXT, deleted=_FLAG),
    "Answer": {
        "type": "object",
        "description": "The engine's answer in OpenAI's form; with `stream` these events, the last one `[DONE]`.",
    },
    "Decision": _object(
        ["model", "thinking", "sources", "warnings", "steps", "facts", "decision_ms"],
        model=_TEXT,
        thinking=_FLAG,
        budget=_SIZE,
        sources=_object(["model", "thinking"], model=_TEXT, thinking=_TEXT),
        rule=_TEXT,
        score=_NUMBER,
        size_score=_NUMBER,
        scorer=_TEXT,
        better_model=_TEXT,
        fallback=_TEXT,
        warnings={"type": "array", "items": _TEXT},
        steps={
            "type": "array",
            "items": _object(["step", "about", "verdict"], step=_TEXT, about=_TEXT, verdict=_TEXT),
        },
        facts=_TEXT,
        decision_ms=_NUMBER,
    ),
    "Model": _object(
        ["id", "object", "created", "owned_by", "root"],
        id=_TEXT,
        object={"const": "model"},
        created=_SIZE,
        owned_by=_TEXT,
        root=_TEXT,
        max_model_len=_COUNT,
        aliases={"type": "array", "items": _TEXT},
        tier={**_TEXT, "description": "`resident` or `lazy`."},
        abilities={"type": "array", "items": _TEXT},
        state=_TEXT,
        progress=_NUMBER,
        in_flight=_SIZE,
        place={**_SIZE, "description": "In the queue for memory."},
        expected_wake_s=_NUMBER,
        load_s=_NUMBER,
        memory_bytes=_SIZE,
        pinned=_FLAG,
        loads=_SIZE,
        wakes=_SIZE,
        load_phases={"type": "object", "additionalProperties": _NUMBER},
        failure=_TEXT,
    ),
    "Models": _object(["object", "data"], object={"const": "list"}, data={"type": "array", "items": _ref("Model")}),
    "Ordered": _object(["id", "order", "state"], id=_TEXT, order=_TEXT, state=_TEXT),
    "Health": _object(["status", "service"], status=_TEXT, service=_TEXT),
    "Readiness": _object(["ready"], ready=_FLAG, models={"type": "object"}, load_path=_TEXT),
    "Error": _object(
        ["error"],
        error=_object(["message", "type"], message=_TEXT, type=_TEXT, param=_TEXT, code=_TEXT),
    ),
}


def _content(schema: str, kind: str = "application/json") -> Schema:
    return {kind: {"schema": _ref(schema)}}


def _answers(schema: str, status: int = 200, *, stream: bool = False) -> Schema:
    content = _content(schema) | (_content(schema, "text/event-stream") if stream else {})
    return {
        str(status): {"description": "The answer.", "content": content},
        "default": {"description": "OpenAI's error form; 429 and 503 say `Retry-After`.", "content": _content("Error")},
    }


def _post(summary: str, body: str, answer: str, *, stream: bool = False) -> Schema:
    asked = {"required": True, "content": _content(body)}
    return {"post": {"summary": summary, "requestBody": asked, "responses": _answers(answer, stream=stream)}}


def _get(summary: str, answer: str, **more: Any) -> Schema:
    return {"get": {"summary": summary, "responses": _answers(answer), **more}}


def _in_path(name: str, **schema: Any) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": {**_TEXT, **schema}}


_ID = _in_path("id")
_PROBE: Schema = {"security": []}
_ORDER: Schema = {
    "post": {
        "summary": "Load, unload or pin a lazy model. For operators.",
        "parameters": [_ID, _in_path("order", enum=[order.value for order in Order])],
        "responses": _answers("Ordered", 202),
    }
}


def _kept(what: str, schema: str) -> Schema:
    return {
        "get": {"summary": f"A {what} that this key began.", "parameters": [_ID], "responses": _answers(schema)},
        "delete": {"summary": "Forget it.", "parameters": [_ID], "responses": _answers("Deleted")},
    }


def document(*, keeps: bool) -> Schema:
    """The whole document. `keeps`: conversations are."""
    kept = {
        "/v1/router/conversations/{id}": _kept("conversation", "Conversation"),
        "/v1/responses/{id}": _kept("response", "Answer"),
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Switchyard",
            "version": "v1",
            "description": "An OpenAI-compatible router. Ids in paths may hold `/`, plain or encoded.",
        },
        "security": [{"bearer": []}, {"key": []}],
        "paths": {
            "/v1/chat/completions": _post("Answer a chat.", "ChatRequest", "Answer", stream=True),
            "/v1/completions": _post("Continue a text.", "CompletionRequest", "Answer", stream=True),
            "/v1/embeddings": _post("Embed texts.", "EmbeddingRequest", "Answer"),
            "/v1/responses": _post("Answer, in the Responses API.", "ResponseRequest", "Answer", stream=True),
            **(kept if keeps else {}),
            "/v1/models": _get("The models that this key may use.", "Models"),
            "/v1/models/{id}": _get("One of them.", "Model", parameters=[_ID]),
            "/v1/router/preview": _post("How a chat would be routed; runs nothing.", "ChatRequest", "Decision"),
            "/v1/router/models/{id}/{order}": _ORDER,
            "/health": _get("Whether this process answers.", "Health", **_PROBE),
            "/ready": {
                "get": {
                    "summary": "Whether the resident models would answer. Names them only to those who have a key.",
                    "responses": {
                        status: {"description": description, "content": _content("Readiness")}
                        for status, description in (("200", "Yes."), ("503", "No."))
                    },
                    **_PROBE,
                }
            },
            "/openapi.json": {
                "get": {
                    "summary": "This document.",
                    "responses": {
                        "200": {
                            "description": "OpenAPI 3.1.",
                            "content": {"application/json": {"schema": {"type": "object"}}},
                        }
                    },
                }
            },
        },
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }
