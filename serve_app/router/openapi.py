"""`GET /openapi.json`: what the front door answers, as an OpenAPI 3.1 document. Written by hand; a test holds it true.

Bodies name the fields that the router itself reads or checks; all others pass on to the engine.
"""

from __future__ import annotations

from typing import Any, get_args

from serve_app.batches.plan import ENDPOINTS
from serve_app.batches.state import Status
from serve_app.residency.events import Order
from serve_app.router.batches import LONGEST_PAGE as LONGEST_BATCH_PAGE
from serve_app.router.files import LONGEST_PAGE as LONGEST_FILE_PAGE

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_COUNT: Schema = {"type": "integer", "minimum": 1}
_SIZE: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_TEXTS: Schema = {"type": ["string", "array"]}
_TO_SCORE: Schema = {"type": ["string", "array", "object"]}
_BYTES: Schema = {"type": "string", "contentMediaType": "application/octet-stream"}
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


def _either(*ways: list[str], **properties: Schema) -> Schema:
    """An object with all the fields of one of these ways at least."""
    named = [name for way in ways for name in way]
    return {**_object(named, **properties), "required": [], "anyOf": [{"required": way} for way in ways]}


def _number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def _listed(name: str) -> Schema:
    """A page of OpenAI's lists."""
    return _object(
        ["object", "data", "has_more"],
        object={"const": "list"},
        data={"type": "array", "items": _ref(name)},
        first_id=_TEXT,
        last_id=_TEXT,
        has_more=_FLAG,
    )


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
        thinking={"type": "object", "description": "`type`: `enabled` or `disabled`; `budget_tokens`."},
        reasoning={"type": "object", "description": "`effort`, `enabled` or `max_tokens`."},
        mode={**_TEXT, "description": "`thinking` or `non_thinking`, whatever the router would choose."},
        conversation={"type": ["string", "object"], "description": "Keeps its model from one request to the next."},
    ),
    "CompletionRequest": _object(["prompt"], prompt=_TEXTS, **_SAMPLING),
    "EmbeddingRequest": _object(["input"], input=_TEXTS, model=_SAMPLING["model"], user=_TEXT),
    "TokenizeRequest": _either(
        ["prompt"],
        ["messages"],
        prompt=_TEXT,
        messages={"type": "array", "items": _MESSAGE},
        model=_SAMPLING["model"],
    ),
    "DetokenizeRequest": _object(["tokens"], tokens={"type": "array", "items": _SIZE}, model=_SAMPLING["model"]),
    "ScoreRequest": _either(
        ["text_1", "text_2"],
        ["queries", "documents"],
        ["queries", "items"],
        ["data_1", "data_2"],
        **dict.fromkeys(("text_1", "text_2", "queries", "documents", "items", "data_1", "data_2"), _TO_SCORE),
        model=_SAMPLING["model"],
        user=_TEXT,
    ),
    "RerankRequest": _object(
        ["query", "documents"],
        query=_TO_SCORE,
        documents=_TO_SCORE,
        model=_SAMPLING["model"],
        user=_TEXT,
    ),
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
        "description": "The engine's answer, in OpenAI's or vLLM's form; with `stream` events, the last one `[DONE]`.",
    },
    "FileUpload": _object(
        ["file", "purpose"],
        file={**_BYTES, "description": "With a file name."},
        purpose={"const": "batch"},
        **{"expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000}},
    ),
    "File": _object(
        ["id", "object", "bytes", "created_at", "expires_at", "filename", "purpose", "status"],
        id=_TEXT,
        object={"const": "file"},
        bytes=_SIZE,
        created_at=_SIZE,
        expires_at=_SIZE,
        filename=_TEXT,
        purpose=_TEXT,
        status=_TEXT,
    ),
    "Files": _listed("File"),
    "BatchRequest": _object(
        ["input_file_id", "endpoint", "completion_window"],
        input_file_id=_TEXT,
        endpoint={"enum": list(ENDPOINTS)},
        completion_window={**_TEXT, "description": "Hours or days, such as `24h`; at most `30d`."},
        metadata={
            "type": "object",
            "maxProperties": 16,
            "propertyNames": {"maxLength": 64},
            "additionalProperties": {"type": "string", "maxLength": 512},
        },
    ),
    "Batch": _object(
        ["id", "object", "endpoint", "input_file_id", "completion_window", "status", "created_at", "request_counts"],
        id=_TEXT,
        object={"const": "batch"},
        endpoint=_TEXT,
        input_file_id=_TEXT,
        output_file_id=_TEXT,
        error_file_id=_TEXT,
        completion_window=_TEXT,
        status={"enum": list(get_args(Status))},
        errors={"type": "object"},
        created_at=_SIZE,
        expires_at=_SIZE,
        **{f"{status}_at": _SIZE for status in get_args(Status) if status != "validating"},
        request_counts=_object(["total", "completed", "failed"], total=_SIZE, completed=_SIZE, failed=_SIZE),
        metadata={"type": "object"},
    ),
    "Batches": _listed("Batch"),
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
        max_ongoing_requests={**_COUNT, "description": "In one replica."},
        max_queued_requests={**_SIZE, "description": "In one Router."},
        state=_TEXT,
        progress=_NUMBER,
        in_flight=_SIZE,
        waiting=_SIZE,
        kv_cache=_NUMBER,
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
    "Items": _listed("Answer"),
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


def _post(summary: str, body: str, answer: str, *, stream: bool = False, kind: str = "application/json") -> Schema:
    asked = {"required": True, "content": _content(body, kind)}
    return {"post": {"summary": summary, "requestBody": asked, "responses": _answers(answer, stream=stream)}}


def _get(summary: str, answer: str, **more: Any) -> Schema:
    return {"get": {"summary": summary, "responses": _answers(answer), **more}}


def _in_path(name: str, **schema: Any) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": {**_TEXT, **schema}}


def _in_query(name: str, **schema: Any) -> Schema:
    return {"name": name, "in": "query", "schema": schema}


_ID = _in_path("id")
_SORT = _in_query("order", enum=["asc", "desc"])
_PROBE: Schema = {"security": []}
_ORDER: Schema = {
    "post": {
        "summary": "Load, put to sleep, unload or pin a lazy model. For operators.",
        "parameters": [_ID, _in_path("order", enum=[order.value for order in Order])],
        "responses": _answers("Ordered", 202),
    }
}


def _kept(what: str, schema: str) -> Schema:
    return {
        "get": {"summary": f"A {what} that this key began.", "parameters": [_ID], "responses": _answers(schema)},
        "delete": {"summary": "Forget it.", "parameters": [_ID], "responses": _answers("Deleted")},
    }


def _page(most: int) -> list[Schema]:
    return [_in_query("after", **_TEXT), _in_query("limit", type="integer", minimum=1, maximum=most)]


def _files_and_batches() -> Schema:
    """Their paths; where `batches.directory` is not set each answers 404 `batches_off`."""
    file, batch = [_in_path("file_id")], [_in_path("batch_id")]
    narrowed = [_SORT, _in_query("purpose", **_TEXT)]
    content = {
        "200": {"description": "The content.", "content": {"application/octet-stream": {"schema": _BYTES}}},
        "default": _answers("File")["default"],
    }
    cancelled = {"summary": "End it; what has run is kept.", "parameters": batch, "responses": _answers("Batch")}
    return {
        "/v1/files": {
            **_post("Keep a file of requests for a batch.", "FileUpload", "File", kind="multipart/form-data"),
            **_get("The files of this key.", "Files", parameters=[*_page(LONGEST_FILE_PAGE), *narrowed]),
        },
        "/v1/files/{file_id}": {
            **_get("What is known of one.", "File", parameters=file),
            "delete": {"summary": "Forget it.", "parameters": file, "responses": _answers("Deleted")},
        },
        "/v1/files/{file_id}/content": {
            "get": {"summary": "Its content.", "parameters": file, "responses": content},
        },
        "/v1/batches": {
            **_post("Run a file's requests when there is room.", "BatchRequest", "Batch"),
            **_get("The batches of this key.", "Batches", parameters=_page(LONGEST_BATCH_PAGE)),
        },
        "/v1/batches/{batch_id}": _get("How one stands.", "Batch", parameters=batch),
        "/v1/batches/{batch_id}/cancel": {"post": cancelled},
    }


def document(*, keeps: bool) -> Schema:
    """The whole document. `keeps`: conversations are."""
    cancel = {"summary": "None can be.", "parameters": [_ID], "responses": _answers("Error", 400)}
    kept = {
        "/v1/router/conversations/{id}": _kept("conversation", "Conversation"),
        "/v1/responses/{id}": _kept("response", "Answer"),
        "/v1/responses/{id}/input_items": _get("What it is made from.", "Items", parameters=[_ID, _SORT, *_page(100)]),
        "/v1/responses/{id}/cancel": {"post": cancel},
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
            "/tokenize": _post("The tokens of a text or a chat.", "TokenizeRequest", "Answer"),
            "/detokenize": _post("The text of tokens.", "DetokenizeRequest", "Answer"),
            "/v1/score": _post("How well texts go together.", "ScoreRequest", "Answer"),
            "/v1/rerank": _post("Order documents by a query.", "RerankRequest", "Answer"),
            **(kept if keeps else {}),
            **_files_and_batches(),
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
