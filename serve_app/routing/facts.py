"""Reads a request body: checks its form and states what the rest of the router wants to know. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from serve_app.errors import bad_request
from serve_app.routing import messages
from serve_app.routing.constraint_cost import check_cost
from serve_app.routing.constraints import asks_for_form
from serve_app.routing.excerpt import Excerpt, has_image, read_excerpt, text_of, tokens_in, without_harness
from serve_app.routing.message_form import check_message
from serve_app.routing.pairs import pairs_of
from serve_app.routing.responses import as_chat
from serve_app.routing.schemas import check_schemas
from serve_app.routing.tool_form import with_choice_in_place

Endpoint = Literal[
    "chat",
    "completions",
    "embeddings",
    "responses",
    "messages",
    "count_tokens",
    "tokenize",
    "detokenize",
    "score",
    "rerank",
]
_ABILITIES = {
    "responses": "chat",
    "messages": "chat",
    "count_tokens": "chat",
    "rerank": "score",
    "tokenize": None,
    "detokenize": None,
}
CHATS = frozenset({"chat", "responses", "messages"})
# They generate nothing: no sampling, no stream, no thinking.
PLAIN_ENDPOINTS = frozenset({"embeddings", "tokenize", "detokenize", "count_tokens", "score", "rerank"})
Body = dict[str, Any]
# A text, two that are compared, or tokens.
Prompt = str | tuple[str, str] | list[int]

# Optional fields of OpenAI's API: null means the same as leaving them out.
_NULLABLE = frozenset(
    {
        "audio",
        "background",
        "best_of",
        "chat_template_kwargs",
        "conversation",
        "ec_transfer_params",
        "echo",
        "enable_thinking",
        "extra_body",
        "frequency_penalty",
        "function_call",
        "functions",
        "instructions",
        "kv_transfer_params",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_output_tokens",
        "max_tokens",
        "metadata",
        "output_config",
        "min_p",
        "min_tokens",
        "modalities",
        "mode",
        "model",
        "n",
        "parallel_tool_calls",
        "prediction",
        "presence_penalty",
        "previous_response_id",
        "reasoning",
        "reasoning_effort",
        "response_format",
        "seed",
        "service_tier",
        "stop",
        "stop_sequences",
        "store",
        "stream",
        "stream_options",
        "structured_outputs",
        "suffix",
        "system",
        "temperature",
        "text",
        "thinking",
        "think",
        "thinking_token_budget",
        "tool_choice",
        "tools",
        "top_k",
        "top_logprobs",
        "top_p",
        "user",
        "vllm_xargs",
    }
)


# Whole numbers; languages that have but one kind of number may write them as 512.0.
_WHOLE = (
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "thinking_token_budget"),
    *("n", "best_of", "seed", "top_k", "top_logprobs"),
)
_LARGEST_EXACT = 2**53

# As many as OpenAI and vLLM take; where a model thinks the Router looks for them itself.
_MOST_STOPS, _LONGEST_STOP = 4, 256
_MOST_MESSAGES = 10_000


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_texts(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))


def _are_stops(value: object) -> bool:
    texts = [value] if isinstance(value, str) else value
    return (
        _is_texts(value)
        and isinstance(texts, list)
        and len(texts) <= _MOST_STOPS
        and all(len(text) <= _LONGEST_STOP for text in texts)
    )


_Check = tuple[Callable[[Any], bool], str]
_FLAG: _Check = (lambda value: isinstance(value, bool), "must be true or false")
_COUNT: _Check = (lambda value: _is_int(value) and value >= 1, "must be a whole number of at least 1")
_OBJECT: _Check = (lambda value: isinstance(value, dict), "must be an object")
_LIST: _Check = (lambda value: isinstance(value, list), "must be an array")
# Words between engines: where to fetch a KV cache from. vLLM (0.32) reads them from `vllm_xargs` as well, and a text
# there is a fault of the server's.
_OF_ENGINES = ("kv_transfer_params", "ec_transfer_params")
# Arguments of the function that renders a template, or of what calls it: none is a variable of a template.
_OF_RENDERERS = frozenset(
    {
        "chat_template",
        "conversation",
        "max_length",
        "model_config",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer",
        "tokenizer_kwargs",
        "truncation",
    }
)


def _number(low: float, high: float) -> _Check:
    return (
        lambda value: _is_number(value) and low <= value <= high,
        f"must be a number from {low:g} to {high:g}",
    )


def _whole(low: int, high: int) -> _Check:
    return (
        lambda value: _is_int(value) and low <= value <= high,
        f"must be a whole number from {low} to {high}",
    )


# Checked here although the engine checks them too: a wrong request must not wake a sleeping model.
_CHECKS: Mapping[str, _Check] = {
    "stream": _FLAG,
    "parallel_tool_calls": _FLAG,
    "max_tokens": _COUNT,
    "max_completion_tokens": _COUNT,
    "max_output_tokens": _COUNT,
    # OpenAI's limit. (vLLM 0.32 takes `best_of` and does nothing with it; older ones decode so many answers.)
    **dict.fromkeys(("n", "best_of"), _whole(1, 128)),
    "seed": (_is_int, "must be a whole number"),
    "temperature": _number(0, 2),
    "top_p": _number(0, 1),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "stop": (_are_stops, f"must be a string or at most {_MOST_STOPS} strings, of at most {_LONGEST_STOP} characters"),
    "stop_sequences": (
        lambda value: isinstance(value, list) and _are_stops(value),
        f"must be at most {_MOST_STOPS} strings, of at most {_LONGEST_STOP} characters",
    ),
    "user": (lambda value: isinstance(value, str), "must be a string"),
    "tools": _LIST,
    "stream_options": _OBJECT,
    "response_format": _OBJECT,
    "structured_outputs": _OBJECT,
    "logit_bias": _OBJECT,
    "chat_template_kwargs": (
        lambda value: isinstance(value, dict) and not _OF_RENDERERS & value.keys(),
        "must be an object, of variables of the model's template",
    ),
    "vllm_xargs": (
        lambda value: isinstance(value, dict) and not any(field in value for field in _OF_ENGINES),
        "must be an object, without what engines tell each other",
    ),
    **dict.fromkeys(_OF_ENGINES, (lambda value: False, "is for engines among themselves; leave it out")),
}


def _no_header(name: str) -> str | None:
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """What a request says. `model` is None where the router is to choose; `last_user_text` is the last user turn.

    `json_schema`: the answer is held to a form. `header` looks up a request header, `key` is the fingerprint of the
    client's API key; rules may ask for both. `excerpt`: of a chat, and of `responses` and `messages`, whose body `chat`
    is in the words of the chat API (elsewhere it is the body itself): what is decided by, and never sent. `effort`:
    bounds the thinking that the router itself chooses.
    """

    endpoint: Endpoint
    body: Body
    model: str | None
    stream: bool
    max_tokens: int | None
    last_user_text: str
    has_images: bool = False
    json_schema: bool = False
    excerpt: Excerpt | None = None
    header: Callable[[str], str | None] = _no_header
    key: str = ""
    chat: Body = dataclasses.field(default_factory=dict)
    effort: str | None = None

    @property
    def ability(self) -> str | None:
        """What a model must be able to do for this endpoint; None: every model can."""
        return _ABILITIES.get(self.endpoint, self.endpoint)


def read_facts(
    parsed: object, endpoint: Endpoint, header: Callable[[str], str | None] = _no_header, key: str = ""
) -> Facts:
    """Check the form of a parsed JSON body. Raises `ApiError` (400) that names the field, never its content.

    The body of the result is a new dict without the fields that were null; the client's own is not changed.
    """
    if not isinstance(parsed, dict):
        raise bad_request("The body must be a JSON object.")
    body = _with_whole_numbers(_with_switch_in_place(_without_nulls(_hoisted(_without_nulls(parsed)))))
    model = body.get("model")
    if model is not None and not (isinstance(model, str) and model):
        raise bad_request("`model` must be a non-empty string, or left out.", "model")
    for field, (holds, message) in _CHECKS.items():
        if field in body and not holds(body[field]) and not (endpoint == "completions" and _only_echoes(field, body)):
            raise bad_request(f"`{field}` {message}.", field)
    if endpoint == "chat":
        body = with_choice_in_place(body)
    chat = _in_chat_words(body, endpoint)
    check_schemas(chat)
    check_cost(chat)
    text, images = "", False
    match endpoint:
        case "chat" | "responses" | "messages":
            text, images = _read_chat(chat)
        case "completions":
            _check_texts(body, "prompt")
        case "embeddings":
            _check_texts(body, "input")
    return Facts(
        endpoint=endpoint,
        body=body,
        model=model,
        # What generates nothing never streams, whatever the client says: its answer is one JSON object.
        stream=endpoint not in PLAIN_ENDPOINTS and body.get("stream", False),
        max_tokens=chat.get("max_completion_tokens", chat.get("max_tokens")),
        last_user_text=text,
        has_images=images,
        json_schema=asks_for_form(chat),
        excerpt=read_excerpt(chat["messages"], chat.get("tools") or ()) if endpoint in CHATS else None,
        header=header,
        key=key,
        chat=chat,
        effort=messages.adaptive_effort(body) if endpoint == "messages" else None,
    )


def _only_echoes(field: str, body: Body) -> bool:
    """A completion of no token gives back its prompt, with the log probabilities that evaluations ask for."""
    return field == "max_tokens" and body[field] == 0 and body.get("echo") is True


def _in_chat_words(body: Body, endpoint: Endpoint) -> Body:
    if endpoint == "responses":
        return as_chat(body)
    if endpoint in ("messages", "count_tokens"):
        return messages.as_chat(body, generates=endpoint == "messages")
    return body


def _hoisted(body: Body) -> Body:
    """Fields sent in a literal `extra_body`, as people do who call without OpenAI's client, are fields."""
    nested = body.get("extra_body")
    if nested is None:
        return body
    if not isinstance(nested, dict):
        raise bad_request("`extra_body` must be an object; its fields may also stand beside `messages`.", "extra_body")
    given = {key: value for key, value in body.items() if key != "extra_body"}
    inner, outer = nested.get("chat_template_kwargs"), given.get("chat_template_kwargs")
    if isinstance(inner, dict) and isinstance(outer, dict):
        given["chat_template_kwargs"] = {**inner, **outer}
    return {**nested, **given}


def _with_switch_in_place(body: Body) -> Body:
    """`enable_thinking` beside `messages`, as some clouds take it for Qwen3, is the template's switch.

    So is Ollama's `think`, which may name an effort instead.
    """
    if isinstance(body.get("think"), str):
        body.setdefault("reasoning_effort", body.pop("think"))
    field = "enable_thinking" if "enable_thinking" in body else "think"
    if field not in body:
        return body
    value = body.pop(field)
    body.pop("think", None)
    if not isinstance(value, bool):
        raise bad_request(f"`{field}` must be true or false.", field)
    kwargs = body.get("chat_template_kwargs", {})
    if isinstance(kwargs, dict) and kwargs.get("enable_thinking") is None:
        body["chat_template_kwargs"] = {**kwargs, "enable_thinking": value}
    return body


def _with_whole_numbers(body: Body) -> Body:
    """512.0 is 512. The body is a new one already."""
    for field in _WHOLE:
        value = body.get(field)
        if isinstance(value, float) and value.is_integer() and abs(value) <= _LARGEST_EXACT:
            body[field] = int(value)
    return body


def _without_nulls(body: Body) -> Body:
    return {key: value for key, value in body.items() if value is not None or key not in _NULLABLE}


def _read_chat(body: Body) -> tuple[str, bool]:
    """The text of the last user message, and whether any message holds an image."""
    given = body.get("messages")
    if not isinstance(given, list):
        raise bad_request("`messages` must be an array of messages.", "messages")
    if not given:
        raise bad_request("`messages` is empty; it needs at least one message.", "messages")
    if len(given) > _MOST_MESSAGES:
        raise bad_request(f"`messages` has more than {_MOST_MESSAGES} messages.", "messages")
    last_user, images = "", False
    for index, message in enumerate(given):
        check_message(message, f"messages[{index}]")
        if message["role"] == "user":
            last_user = without_harness(text_of(message.get("content")))
        images = images or has_image(message)
    return last_user, images


def _check_texts(body: Body, field: str) -> None:
    value = body.get(field)
    if not isinstance(value, str | list) or value == []:
        raise bad_request(f"`{field}` must be a string, or an array of strings or tokens.", field)


def prompts_of(facts: Facts) -> Sequence[Prompt]:
    """The prompts of a completion, the inputs of embeddings, or the pairs that are scored."""
    if facts.endpoint in ("score", "rerank"):
        return pairs_of(facts.body)
    given = facts.body.get("input" if facts.endpoint == "embeddings" else "prompt")
    if not isinstance(given, list):
        return [given] if isinstance(given, str) else []
    # What is neither an engine refuses.
    return [given] if given and isinstance(given[0], int) else [one for one in given if isinstance(one, str | list)]


def size_of(prompt: Prompt) -> int:
    """Tokens of one prompt; of a text by estimate."""
    if isinstance(prompt, list):
        return len(prompt)
    return sum(map(tokens_in, [prompt] if isinstance(prompt, str) else prompt))


def estimate_of(facts: Facts) -> int:
    """About how many tokens the prompt has; the longest of several."""
    if facts.excerpt is not None:
        return facts.excerpt.prompt_tokens
    return max(map(size_of, prompts_of(facts)), default=0)
