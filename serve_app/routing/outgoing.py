"""The body for the engine: the client's, with what the decision says and the same form for every model. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serve_app.model_schema import Model
from serve_app.routing.constraints import with_constraints_in_place
from serve_app.routing.control_tokens import without_markers
from serve_app.routing.decision import Decision
from serve_app.routing.excerpt import text_of
from serve_app.routing.facts import CHATS, PLAIN_ENDPOINTS, Facts
from serve_app.routing.message_form import check_roles, uniform
from serve_app.routing.tool_form import check_tools
from serve_app.routing.tool_schemas import with_schemas_compiled

# Said to the router, not to an engine; what they mean reaches it as the hard switch and the budget.
_ROUTER_FIELDS = ("mode", "conversation", "priority")
_THINKING_FIELDS = ("reasoning_effort", "thinking_token_budget", "thinking", "reasoning")
# The same in Anthropic's words: vLLM (0.32) takes no budget below 1024 there, and its `disabled` is an effort.
_MESSAGES_FIELDS = ("thinking", "output_config")
_SYSTEM_ROLES = frozenset({"system", "developer"})
_LEAST_TOP_P = 1e-6
# A parser of these names reads calls that begin like this.
_CALLS = {"hermes": "<tool_call>", "qwen3_json": "<tool_call>"}
# What servers put into their own messages, this one too, and templates or validators do not take back.
_EMPTY_FIELDS = ("tool_calls", "function_call", "refusal", "audio", "annotations")


def engine_body(facts: Facts, decision: Decision, model: Model) -> dict[str, Any]:
    """The body for the engine: the client's, with the model's id, the hard switch and what it left unset.

    "Not thinking" is said explicitly (Qwen3 thinks by default). All other fields pass as they came, but for the markers
    of chat templates in them (`control_tokens`; raises `ApiError`, 400, where the model refuses them).
    """
    body = {**without_markers(facts.body, facts.endpoint, model), "model": model.served_name}
    # A server that is not ours may know what they mean where we do not.
    known = model.thinking.supported or not model.external
    for field in (*_ROUTER_FIELDS, *_THINKING_FIELDS) if known else _ROUTER_FIELDS:
        if not (field == "reasoning" and facts.endpoint == "responses"):
            body.pop(field, None)
    if not body.get("tools"):
        # As OpenAI does it: no tools is no tools, however it is said. (vLLM refuses an empty list.)
        body.pop("tools", None)
        if body.get("tool_choice") in ("none", "auto", {"type": "none"}, {"type": "auto"}):
            del body["tool_choice"]
    if facts.endpoint == "responses":
        body = uniform_response(body)
    if not model.external and facts.endpoint not in PLAIN_ENDPOINTS:
        body = with_constraints_in_place(body)
    if facts.endpoint == "chat":
        if not model.external:
            check_roles(body["messages"])
            check_tools(body)
        body["messages"] = [uniform(message) for message in uniform_messages(body["messages"])]
    if facts.endpoint in CHATS and not model.external:
        body = with_schemas_compiled(body, facts.endpoint)
    if facts.endpoint in ("messages", "count_tokens") and known:
        body = _without_thinking(body)
    if facts.excerpt is not None and model.thinking.supported:
        body["chat_template_kwargs"] = {
            **body.get("chat_template_kwargs", {}),
            "enable_thinking": decision.thinking,
        }
        if decision.budget is not None:
            body["thinking_token_budget"] = decision.budget
    if facts.endpoint in PLAIN_ENDPOINTS:
        return body
    if facts.stream and facts.endpoint not in ("responses", "messages"):
        # The router counts by it; the client gets it only if it asked.
        body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    if facts.endpoint == "messages":
        if stops_of(facts, decision):
            del body["stop_sequences"]
    elif "stop" in body:
        stops = _stops(body["stop"])
        if not stops or stops_of(facts, decision):
            del body["stop"]
        elif isinstance(body["stop"], list):
            body["stop"] = stops
    if hides_thought(facts, decision, model):
        # vLLM (0.32) would hold the thought, which nobody sees, to the form of the answer.
        body.pop("include_reasoning", None)
    sampling = model.sampling.thinking if decision.thinking else model.sampling.plain
    body = {**sampling.values(), **body}
    return body if model.external else _as_vllm_samples(_without_calls(body, facts, model))


def hides_thought(facts: Facts, decision: Decision, model: Model) -> bool:
    """Whether the client wants no word of the thought, in vLLM's words (`include_reasoning`) or in OpenRouter's."""
    if facts.endpoint != "chat" or not decision.thinking or model.external:
        return False
    asked = facts.body.get("reasoning")
    excluded = isinstance(asked, dict) and asked.get("exclude") is True
    return excluded or facts.body.get("include_reasoning") is False


def _without_calls(body: dict[str, Any], facts: Facts, model: Model) -> dict[str, Any]:
    """With no word for a call where none may be made: the model sees its tools all the same, and vLLM parses none.

    Without the tools nothing of the prompt would be in the prefix cache.
    """
    word = _CALLS.get(str(model.engine.get("tool_call_parser")))
    given = body.get("bad_words") or []
    none = facts.endpoint in CHATS and facts.chat.get("tools") and facts.chat.get("tool_choice") == "none"
    # The Responses API (of vLLM 0.32) knows no such words.
    if not word or not none or facts.endpoint == "responses" or not isinstance(given, list):
        return body
    return {**body, "bad_words": [*given, word]}


def _as_vllm_samples(body: dict[str, Any]) -> dict[str, Any]:
    """What OpenAI's API takes and vLLM (0.32) refuses, said so that it samples the same."""
    if body.get("top_p") == 0:
        body = {**body, "top_p": _LEAST_TOP_P}
    several = body.get("n", 1) > 1 and not body.get("use_beam_search")
    if several and body.get("temperature") == 0:
        # Of one token to choose from it takes the likeliest, whatever the temperature.
        body = {**body, "temperature": 1.0, "top_k": 1}
    return body


def _without_thinking(body: dict[str, Any]) -> dict[str, Any]:
    """The body without what it says of thinking; the form that the answer is held to stays."""
    form = (body.get("output_config") or {}).get("format")
    left = {key: value for key, value in body.items() if key not in _MESSAGES_FIELDS}
    return {**left, "output_config": {"format": form}} if form else left


def stops_of(facts: Facts, decision: Decision) -> Sequence[str]:
    """The stop strings that the router itself applies, to the answer: engines apply them to the thought too."""
    if facts.endpoint not in ("chat", "messages") or not decision.thinking:
        return ()
    if facts.body.get("include_stop_str_in_output"):
        return ()
    return tuple(_stops(facts.chat.get("stop") or ()))


def _stops(stop: str | Sequence[str]) -> list[str]:
    """Without empty ones, which stop nothing (and which vLLM refuses)."""
    return [text for text in ([stop] if isinstance(stop, str) else stop) if text]


def uniform_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in the form that every chat template takes, since `auto` may pick any model.

    `developer` is `system`; several system messages become one at the head, in their order; empty fields that
    servers themselves emit are left out. Everything else stays, known or not.
    """
    systems = [index for index, message in enumerate(messages) if message["role"] in _SYSTEM_ROLES]
    if not systems or (systems == [0] and messages[0]["role"] == "system"):
        return [_without_empty(message) for message in messages]
    texts = [text_of(messages[index].get("content")) for index in systems]
    head = {**messages[systems[0]], "role": "system", "content": "\n\n".join(filter(None, texts))}
    return [head, *(_without_empty(message) for message in messages if message["role"] not in _SYSTEM_ROLES)]


def uniform_response(body: dict[str, Any]) -> dict[str, Any]:
    """A Responses body for vLLM: it keeps nothing itself, and system messages stand where templates want them."""
    # `request_id` would be the response's id: two clients may send the same one.
    body = {key: value for key, value in body.items() if key not in ("previous_response_id", "request_id")}
    body["store"] = False
    items = body["input"]
    if isinstance(items, list):
        items = body["input"] = [_said_before(item, index) for index, item in enumerate(items)]
    if isinstance(items, list) and any(item.get("role") in _SYSTEM_ROLES for item in items):
        texts = [body.get("instructions")]
        texts += [text_of(item.get("content")) for item in items if item.get("role") in _SYSTEM_ROLES]
        body["instructions"] = "\n\n".join(filter(None, texts))
        body["input"] = [item for item in items if item.get("role") not in _SYSTEM_ROLES]
    return body


def _said_before(item: dict[str, Any], index: int) -> dict[str, Any]:
    """An answer in the input, with what vLLM (0.32) wants of one and clients leave out: OpenAI's API takes both."""
    parts = item.get("content")
    if item.get("role") != "assistant" or not isinstance(parts, list) or item.get("id") is not None:
        return item
    own = {"type": "message", "status": "completed", **{key: value for key, value in item.items() if value is not None}}
    told = [{"annotations": [], **part} if _is_output(part) else part for part in parts]
    return {**own, "id": f"msg_{index}", "content": told}


def _is_output(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "output_text"


def _without_empty(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "assistant":
        return message
    empty = [field for field in _EMPTY_FIELDS if field in message and not message[field]]
    return {key: value for key, value in message.items() if key not in empty} if empty else message
