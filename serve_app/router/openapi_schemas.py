"""The bodies of the OpenAPI document by name: the fields that the router itself reads or checks."""

from __future__ import annotations

from typing import Any, get_args

from serve_app.batches.plan import ENDPOINTS
from serve_app.batches.state import Status

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_COUNT: Schema = {"type": "integer", "minimum": 1}
SIZE: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_TEXTS: Schema = {"type": ["string", "array"]}
_TO_SCORE: Schema = {"type": ["string", "array", "object"]}
BYTES: Schema = {"type": "string", "contentMediaType": "application/octet-stream"}
_EFFORTS = ["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def ref(name: str) -> Schema:
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
        data={"type": "array", "items": ref(name)},
        first_id=TEXT,
        last_id=TEXT,
        has_more=_FLAG,
    )


_SAMPLING: dict[str, Schema] = {
    "model": {**TEXT, "description": "An id or alias of /v1/models; `auto`, or nothing, lets the router choose."},
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
    "user": TEXT,
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {"role": TEXT, "content": {"type": ["string", "array", "null"]}},
}
_MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": {"type": ["string", "array"]}},
    },
}
_MESSAGES_FIELDS: dict[str, Schema] = {
    "model": _SAMPLING["model"],
    "system": _TEXTS,
    "tools": {"type": "array", "items": {"type": "object", "required": ["name", "input_schema"]}},
    "tool_choice": {"type": "object"},
    "thinking": {
        "type": "object",
        "required": ["type"],
        "properties": {"type": {"enum": ["enabled", "disabled", "adaptive"]}, "budget_tokens": _COUNT},
        "description": "`adaptive`, or nothing, leaves it to the router.",
    },
    "output_config": {"type": "object", "description": "`effort`: how much to think; `format`: a JSON schema."},
}
SCHEMAS: dict[str, Schema] = {
    "ChatRequest": _object(
        ["messages"],
        messages={"type": "array", "minItems": 1, "items": _MESSAGE},
        **_SAMPLING,
        max_completion_tokens=_COUNT,
        tools={"type": "array"},
        tool_choice={"type": ["string", "object"]},
        response_format={"type": "object"},
        reasoning_effort={**TEXT, "description": f"How much to think: {', '.join(_EFFORTS)}."},
        thinking={"type": "object", "description": "`type`: `enabled` or `disabled`; `budget_tokens`."},
        reasoning={"type": "object", "description": "`effort`, `enabled` or `max_tokens`."},
        mode={**TEXT, "description": "`thinking` or `non_thinking`, whatever the router would choose."},
        conversation={"type": ["string", "object"], "description": "Keeps its model from one request to the next."},
    ),
    "CompletionRequest": _object(["prompt"], prompt=_TEXTS, **_SAMPLING),
    "EmbeddingRequest": _object(["input"], input=_TEXTS, model=_SAMPLING["model"], user=TEXT),
    "TokenizeRequest": _either(
        ["prompt"],
        ["messages"],
        prompt=TEXT,
        messages={"type": "array", "items": _MESSAGE},
        model=_SAMPLING["model"],
    ),
    "DetokenizeRequest": _object(["tokens"], tokens={"type": "array", "items": SIZE}, model=_SAMPLING["model"]),
    "ScoreRequest": _either(
        ["text_1", "text_2"],
        ["queries", "documents"],
        ["queries", "items"],
        ["data_1", "data_2"],
        **dict.fromkeys(("text_1", "text_2", "queries", "documents", "items", "data_1", "data_2"), _TO_SCORE),
        model=_SAMPLING["model"],
        user=TEXT,
    ),
    "RerankRequest": _object(
        ["query", "documents"],
        query=_TO_SCORE,
        documents=_TO_SCORE,
        model=_SAMPLING["model"],
        user=TEXT,
    ),
    "ResponseRequest": _object(
        ["input"],
        input=_TEXTS,
        instructions=TEXT,
        reasoning={"type": "object"},
        text={"type": "object"},
        max_output_tokens=_COUNT,
        previous_response_id=TEXT,
        store=_FLAG,
        **{name: _SAMPLING[name] for name in ("model", "stream", "temperature", "top_p", "user")},
        tools={"type": "array"},
    ),
    "MessagesRequest": _object(
        ["messages", "max_tokens"],
        messages=_MESSAGES,
        max_tokens=_COUNT,
        **_MESSAGES_FIELDS,
        stop_sequences={"type": "array", "maxItems": 16, "items": {**TEXT, "maxLength": 256}},
        metadata={"type": "object"},
        **{name: _SAMPLING[name] for name in ("stream", "temperature", "top_p")},
        top_k={"type": "integer"},
    ),
    "CountTokensRequest": _object(["messages"], messages=_MESSAGES, **_MESSAGES_FIELDS),
    "Conversation": _object(
        ["id", "object", "turns", "tokens", "messages"],
        id=TEXT,
        object={"const": "conversation"},
        turns=SIZE,
        tokens=SIZE,
        messages={"type": "array", "items": {"type": "object"}},
    ),
    "Deleted": _object(["id", "object", "deleted"], id=TEXT, object=TEXT, deleted=_FLAG),
    "Answer": {
        "type": "object",
        "description": "In OpenAI's, Anthropic's or vLLM's form; with `stream` events, the last one `[DONE]` (OpenAI).",
    },
    "FileUpload": _object(
        ["file", "purpose"],
        file={**BYTES, "description": "With a file name."},
        purpose={"const": "batch"},
        **{"expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000}},
    ),
    "File": _object(
        ["id", "object", "bytes", "created_at", "expires_at", "filename", "purpose", "status"],
        id=TEXT,
        object={"const": "file"},
        bytes=SIZE,
        created_at=SIZE,
        expires_at=SIZE,
        filename=TEXT,
        purpose=TEXT,
        status=TEXT,
    ),
    "Files": _listed("File"),
    "BatchRequest": _object(
        ["input_file_id", "endpoint", "completion_window"],
        input_file_id=TEXT,
        endpoint={"enum": list(ENDPOINTS)},
        completion_window={**TEXT, "description": "Hours or days, such as `24h`; at most `30d`."},
        metadata={
            "type": "object",
            "maxProperties": 16,
            "propertyNames": {"maxLength": 64},
            "additionalProperties": {"type": "string", "maxLength": 512},
        },
    ),
    "Batch": _object(
        ["id", "object", "endpoint", "input_file_id", "completion_window", "status", "created_at", "request_counts"],
        id=TEXT,
        object={"const": "batch"},
        endpoint=TEXT,
        input_file_id=TEXT,
        output_file_id=TEXT,
        error_file_id=TEXT,
        completion_window=TEXT,
        status={"enum": list(get_args(Status))},
        errors={"type": "object"},
        created_at=SIZE,
        expires_at=SIZE,
        **{f"{status}_at": SIZE for status in get_args(Status) if status != "validating"},
        request_counts=_object(["total", "completed", "failed"], total=SIZE, completed=SIZE, failed=SIZE),
        metadata={"type": "object"},
    ),
    "Batches": _listed("Batch"),
    "Decision": _object(
        ["model", "thinking", "sources", "warnings", "steps", "facts", "decision_ms"],
        model=TEXT,
        thinking=_FLAG,
        budget=SIZE,
        sources=_object(["model", "thinking"], model=TEXT, thinking=TEXT),
        rule=TEXT,
        score=_NUMBER,
        size_score=_NUMBER,
        scorer=TEXT,
        better_model=TEXT,
        fallback=TEXT,
        warnings={"type": "array", "items": TEXT},
        steps={
            "type": "array",
            "items": _object(["step", "about", "verdict"], step=TEXT, about=TEXT, verdict=TEXT),
        },
        facts=TEXT,
        decision_ms=_NUMBER,
    ),
    "Model": _object(
        ["id", "object", "created", "owned_by", "root"],
        id=TEXT,
        object={"const": "model"},
        created=SIZE,
        owned_by=TEXT,
        root=TEXT,
        max_model_len=_COUNT,
        aliases={"type": "array", "items": TEXT},
        tier={**TEXT, "description": "`resident` or `lazy`."},
        abilities={"type": "array", "items": TEXT},
        max_ongoing_requests={**_COUNT, "description": "In one replica."},
        max_queued_requests={**SIZE, "description": "In one Router."},
        state=TEXT,
        progress=_NUMBER,
        in_flight=SIZE,
        waiting=SIZE,
        kv_cache=_NUMBER,
        place={**SIZE, "description": "In the queue for memory."},
        expected_wake_s=_NUMBER,
        load_s=_NUMBER,
        memory_bytes=SIZE,
        pinned=_FLAG,
        loads=SIZE,
        wakes=SIZE,
        load_phases={"type": "object", "additionalProperties": _NUMBER},
        failure=TEXT,
    ),
    "Models": _object(["object", "data"], object={"const": "list"}, data={"type": "array", "items": ref("Model")}),
    "Items": _listed("Answer"),
    "Ordered": _object(["id", "order", "state"], id=TEXT, order=TEXT, state=TEXT),
    "Health": _object(["status", "service"], status=TEXT, service=TEXT),
    "Readiness": _object(["ready"], ready=_FLAG, models={"type": "object"}, load_path=TEXT),
    "Error": _object(
        ["error"],
        error=_object(["message", "type"], message=TEXT, type=TEXT, param=TEXT, code=TEXT),
    ),
    "AnthropicError": _object(
        ["type", "error"],
        type={"const": "error"},
        error=_object(["type", "message"], type=TEXT, message=TEXT),
    ),
}
