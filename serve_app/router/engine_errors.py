"""What an engine refuses or breaks off, as this API says it: OpenAI's fields, and no word of the client's."""

from __future__ import annotations

import logging
import re
from typing import Any

import orjson

from serve_app.errors import ApiError, unavailable
from serve_app.router.connection import Answer, Broken

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 2.0
_FIELD = re.compile(
    r"(?:model|messages|prompt|input|text_1|text_2|query|documents|tokens|stream|stream_options|max_tokens"
    r"|max_completion_tokens|max_output_tokens|min_tokens|temperature|top_p|top_k|min_p|n|seed|stop|stop_token_ids"
    r"|best_of|ignore_eos|include_reasoning|vllm_xargs|allowed_token_ids"
    r"|presence_penalty|frequency_penalty|repetition_penalty|length_penalty|logit_bias|logprobs|top_logprobs"
    r"|prompt_logprobs|response_format|structured_outputs|tools|tool_choice|parallel_tool_calls|reasoning"
    r"|reasoning_effort|thinking_token_budget|chat_template|chat_template_kwargs|encoding_format|dimensions|user"
    r"|priority|bad_words|echo|suffix|documents|mm_processor_kwargs|truncate_prompt_tokens|previous_response_id"
    r"|system|stop_sequences|thinking|output_config|metadata)"
    r"(?![A-Za-z0-9_])(?:\[\d{1,6}\])?"
)
# One of a validator's findings, as vLLM writes it: its place may hold a key of the client's own.
_FINDING = re.compile(r"'loc': '(?:body\.)?([^']{0,200})', 'msg': (?:'([^']{1,300})'|\"([^\"]{1,300})\")")
# What its messages say besides: where in xgrammar's source, the field again and its value, all that it was asked for.
_ASIDE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: | \(parameter=[^()]*(?:, value=.*)?\)$|: \{'json': .*", re.DOTALL)
_ERROR_BODY_BYTES = 1 << 20
_MESSAGE_CHARS = 600


def broken(how: str) -> ApiError:
    """The error for an engine that died with the request."""
    logger.warning("an engine broke off: %s", how)
    return unavailable(
        "The engine broke off while it answered; try again.",
        code="engine_died",
        retry_after_s=_RETRY_AFTER_S,
    )


def stream_error(chunk: bytes) -> ApiError:
    """The error of an event that says `error`."""
    event = chunk.split(b"\n\n", 1)[0].partition(b"data: ")[2]
    try:
        fields = orjson.loads(event)["error"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        fields = {}
    status = fields.get("code") if isinstance(fields, dict) else None
    return _as_api_error(status if isinstance(status, int) else 500, fields)


async def engine_error(answer: Answer) -> ApiError:
    """An engine's refusal in our shape."""
    raw = b""
    try:
        while len(raw) < _ERROR_BODY_BYTES and (part := await answer.some()):
            raw += part
    except Broken as error:
        raise broken(str(error)) from None
    try:
        fields = orjson.loads(raw)["error"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        fields = {}
    return _as_api_error(answer.status, fields)


def _as_api_error(status: int, fields: Any) -> ApiError:
    """vLLM's error fields as OpenAI's: a word for `code`, a field name for `param`, no input of the client's.

    Faults of the engine become 503: the client did nothing wrong and may come again.
    """
    fields = fields if isinstance(fields, dict) else {}
    message = _without_input(str(fields.get("message") or "The engine refused the request."))
    if not 400 <= status < 500:
        return unavailable(
            "The engine failed on this request; try again.", code="engine_error", retry_after_s=_RETRY_AFTER_S
        )
    param = _known_field(fields.get("param"))
    if finding := _FINDING.search(message):
        param = param or _known_field(finding[1])
        said = (finding[2] or finding[3]).rstrip(".")
        message = f"`{param}`: {said}." if param else f"The body is not what the endpoint takes: {said}."
    if message.startswith("Invalid structural tag specification"):
        message, param = "No grammar can be made of the schemas in `tools`.", param or "tools"
    code = "invalid_value"
    if (
        "context length" in message
        or "context size" in message
        or "max_model_len" in message
        or "longer than the maximum model length" in message
    ):
        code = "context_length_exceeded"
    elif status == 404:
        code = "not_found"
    return ApiError(400 if status == 422 else status, message, code=code, param=param)


def _known_field(param: Any) -> str | None:
    """The request's field that vLLM names; what stands below it may be a word of the client's own."""
    found = _FIELD.match(param) if isinstance(param, str) else None
    return found[0] if found else None


def _without_input(message: str) -> str:
    """vLLM's validation messages quote what the client sent under `input`; ours do not."""
    for marker in ("'input':", '"input":', "input_value=", "input="):
        message = message.split(marker, 1)[0]
    message = _ASIDE.sub("", message)
    return message.rstrip(" ,{[(")[:_MESSAGE_CHARS] or "The engine refused a value in the request."
