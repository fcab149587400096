"""The form of a chat's messages: what is wrong is named by its place, and what means the same is said one way. Pure.

An engine refuses the wrong ones too, but only once it is awake, and in the words of its validator.
"""

from __future__ import annotations

from typing import Any

import orjson

from serve_app.errors import bad_request

# Qwen's and most other templates pass over a message of any other role: the model would never see it.
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
# Of the Responses API; a chat's part has another name for the same.
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


def check_message(message: Any, place: str) -> None:
    """Raise `ApiError` (400) that names the place, never its content."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise bad_request(f"`{place}` must be an object with a `role`.", place)
    for field in ("name", "tool_call_id"):
        if not isinstance(message.get(field), str | None):
            raise bad_request(f"`{place}.{field}` must be a string.", f"{place}.{field}")
    content = message.get("content")
    if not isinstance(content, str | list | None):
        field = f"{place}.content"
        raise bad_request(f"`{field}` must be a string or an array of parts.", field)
    if isinstance(content, list):
        for index, part in enumerate(content):
            _check_part(part, f"{place}.content[{index}]")
    if calls := message.get("tool_calls"):
        _check_calls(calls, f"{place}.tool_calls")


def _check_part(part: Any, place: str) -> None:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise bad_request(f"`{place}` must be an object with a `type`.", place)
    if part["type"] in _TEXT_PARTS and not isinstance(part.get("text"), str):
        raise bad_request(f"`{place}.text` must be a string.", f"{place}.text")


def _check_calls(calls: Any, place: str) -> None:
    if not isinstance(calls, list):
        raise bad_request(f"`{place}` must be an array of calls.", place)
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            where = f"{place}[{index}]"
            raise bad_request(f"`{where}` must be a call of a `function` that has a `name`.", where)
        if not isinstance(call.get("id"), str | None):
            raise bad_request(f"`{place}[{index}].id` must be a string.", f"{place}[{index}].id")


def check_roles(messages: list[dict[str, Any]]) -> None:
    """Raise `ApiError` (400) for a message that no template here would show to its model."""
    for index, message in enumerate(messages):
        if message["role"] not in ROLES:
            field = f"messages[{index}].role"
            raise bad_request(f"`{field}` must be one of {', '.join(sorted(ROLES))}.", field)
        if message.get("function_call"):
            field = f"messages[{index}].function_call"
            raise bad_request(f"`{field}` has no meaning here; use `tool_calls`.", field, "unsupported_field")


def uniform(message: dict[str, Any]) -> dict[str, Any]:
    """The message as vLLM takes it: no null where a text belongs, parts and arguments in OpenAI's form."""
    changed: dict[str, Any] = {}
    content = message.get("content", "")
    if content is None and message["role"] != "assistant":
        changed["content"] = ""
    elif isinstance(content, list) and any(part.get("type") in ("input_text", "output_text") for part in content):
        changed["content"] = [_part(part) for part in content]
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [_call(call, index) for index, call in enumerate(calls)]
    if message.get("name", "") is None:
        # A validator's union of all roles knows no name that is null.
        message = {field: value for field, value in message.items() if field != "name"}
    return {**message, **changed} if changed else message


def _part(part: dict[str, Any]) -> dict[str, Any]:
    return {**part, "type": "text"} if part.get("type") in _TEXT_PARTS else part


def _call(call: dict[str, Any], index: int) -> dict[str, Any]:
    """A call as OpenAI writes it. Ollama's have objects for arguments, and neither id nor type."""
    function = call["function"]
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        try:
            text = "{}" if arguments is None else orjson.dumps(arguments).decode()
        except orjson.JSONEncodeError:
            raise bad_request("A call's `arguments` are nested too deeply.", "messages") from None
        function = {**function, "arguments": text}
    given = {field: value for field, value in call.items() if value is not None or field not in ("id", "type")}
    return {"id": f"call_{index}", "type": "function", **given, "function": function}
