"""What vLLM's Messages API (0.32) lacks, given to its handler; `tests/e2e/test_anthropic.py` holds it true."""

from __future__ import annotations

import json
import logging
from typing import Any

# Of the chat API; Anthropic's has no words for them.
_CHAT_FIELDS = (
    "bad_words",
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "structured_outputs",
    "thinking_token_budget",
)


def complete_messages(state: Any) -> None:
    """`state`: of vLLM's app. The handler asks the chat API's by one method, and this one is wrapped.

    - A thinking budget below 1024, and what else is a field of the chat API only, is taken from the body as it came.
    - It reads the arguments of every call as a JSON object. Those of one that `max_tokens` cut off are none, and the
      whole answer became a 400.
    """
    # It logs what it cannot read, with pieces of it.
    logging.getLogger("vllm.entrypoints.anthropic.api_router").setLevel(logging.CRITICAL)
    handler = getattr(state, "anthropic_serving_messages", None)
    if handler is None:
        return  # an embedding model
    create = handler.create_chat_completion

    async def create_chat_completion(request: Any, raw_request: Any = None) -> Any:
        body = await raw_request.json()
        for name, value in _checked(type(request), {name: body.get(name) for name in _CHAT_FIELDS}).items():
            setattr(request, name, value)
        answer = await create(request, raw_request)
        for choice in getattr(answer, "choices", ()):
            for call in choice.message.tool_calls:
                if not _is_object(call.function.arguments):
                    call.function.arguments = "{}"
        return answer

    handler.create_chat_completion = create_chat_completion


def _checked(chat: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that are set, as the chat API would read them. Raises `ValueError` (400) that quotes nothing."""
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        read = chat.model_validate({"messages": [], **given})
    except ValueError as error:
        wrong = {str(one["loc"][0]) for one in getattr(error, "errors", list)() if one["loc"]}
        raise ValueError(f"Not taken: {', '.join(sorted(wrong)) or 'these fields together'}.") from None
    return {name: getattr(read, name) for name in given}


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
