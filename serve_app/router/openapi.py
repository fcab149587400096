"""`GET /openapi.json`: what the front door answers, as an OpenAPI 3.1 document. Written by hand; a test holds it true.

Bodies name the fields that the router itself reads or checks; all others pass on to the engine.
"""

from __future__ import annotations

from typing import Any

from serve_app.residency.events import Order
from serve_app.router.batches import LONGEST_PAGE as LONGEST_BATCH_PAGE
from serve_app.router.engine_metrics import EXPOSITION
from serve_app.router.events import PATH as EVENTS
from serve_app.router.events import SSE
from serve_app.router.files import LONGEST_PAGE as LONGEST_FILE_PAGE
from serve_app.router.openapi_schemas import BYTES, SCHEMAS, TEXT, Schema, ref


def _content(schema: str, kind: str = "application/json") -> Schema:
    return {kind: {"schema": ref(schema)}}


def _answers(schema: str, status: int = 200, *, stream: bool = False) -> Schema:
    content = _content(schema) | (_content(schema, SSE) if stream else {})
    return {
        str(status): {"description": "The answer.", "content": content},
        "default": {"description": "OpenAI's error form; 429 and 503 say `Retry-After`.", "content": _content("Error")},
    }


def _post(summary: str, body: str, answer: str, *, stream: bool = False, kind: str = "application/json") -> Schema:
    asked = {"required": True, "content": _content(body, kind)}
    return {"post": {"summary": summary, "requestBody": asked, "responses": _answers(answer, stream=stream)}}


def _anthropic(summary: str, body: str, *, stream: bool = False) -> Schema:
    asked = _post(summary, body, "Answer", stream=stream)
    asked["post"]["responses"]["default"] = {
        "description": "Anthropic's error form; 429 and 503 say `Retry-After`.",
        "content": _content("AnthropicError"),
    }
    return asked


def _get(summary: str, answer: str, **more: Any) -> Schema:
    return {"get": {"summary": summary, "responses": _answers(answer), **more}}


def _in_path(name: str, **schema: Any) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": {**TEXT, **schema}}


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
_METRICS: Schema = {
    "get": {
        "summary": "The engines' own metrics (vLLM's) with `model` and `replica`, for Prometheus. For operators.",
        "responses": {
            "200": {"description": "Prometheus' text format.", "content": {EXPOSITION: {"schema": TEXT}}},
            "default": _answers("Ordered", 202)["default"],
        },
    }
}
_EVENTS: Schema = {
    "get": {
        "summary": "What happens in this Router: models, traffic, the latest requests; no prompts. See docs/ui.md.",
        "parameters": [_in_query("once", type="boolean", description="The state of now, and no more.")],
        "responses": {
            "200": {
                "description": "Server-sent events: `hello`, `models`, `traffic`, `requests`, `bye`; data is JSON.",
                "content": {SSE: {"schema": TEXT}},
            },
            "default": _answers("Ordered", 202)["default"],
        },
    }
}


def _kept(what: str, schema: str) -> Schema:
    return {
        "get": {"summary": f"A {what} that this key began.", "parameters": [_ID], "responses": _answers(schema)},
        "delete": {"summary": "Forget it.", "parameters": [_ID], "responses": _answers("Deleted")},
    }


def _page(most: int) -> list[Schema]:
    return [_in_query("after", **TEXT), _in_query("limit", type="integer", minimum=1, maximum=most)]


def _files_and_batches() -> Schema:
    """Their paths; where `batches.directory` is not set each answers 404 `batches_off`."""
    file, batch = [_in_path("file_id")], [_in_path("batch_id")]
    narrowed = [_SORT, _in_query("purpose", **TEXT)]
    content = {
        "200": {"description": "The content.", "content": {"application/octet-stream": {"schema": BYTES}}},
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
            "/v1/messages": _anthropic("Answer, in Anthropic's Messages API.", "MessagesRequest", stream=True),
            "/v1/messages/count_tokens": _anthropic("The tokens of such a request.", "CountTokensRequest"),
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
            "/v1/router/metrics": _METRICS,
            EVENTS: _EVENTS,
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
            "schemas": SCHEMAS,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }
