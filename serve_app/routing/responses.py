"""A body of the Responses API in the words of the chat API, for whoever decides; it is never sent anywhere. Pure."""

from __future__ import annotations

from typing import Any

from serve_app.errors import ApiError, bad_request

_OURS = ("model", "stream", "user", "tool_choice", "chat_template_kwargs", "mode", "thinking_token_budget")
_CALLS = frozenset({"function_call", "custom_tool_call"})
_RESULTS = frozenset({"function_call_output", "custom_tool_call_output"})


# What the client wrote, by the chat API's name for it.
_WRITTEN = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


def named_as_written(error: ApiError) -> ApiError:
    """The same error, with the fields that it names as the Responses API has them."""
    for chats, written in _WRITTEN.items():
        error.message = error.message.replace(f"`{chats}`", f"`{written}`")
    error.param = _WRITTEN.get(error.param or "", error.param)
    return error


def as_chat(body: dict[str, Any]) -> dict[str, Any]:
    """The chat body that asks the same. Raises `ApiError` (400) for what is no input, or not done here."""
    if body.get("background"):
        raise bad_request(
            "Nothing is answered in the background here. Leave `background` out, and stream what takes long;"
            " what may wait is for `/v1/batches`.",
            "background",
            "unsupported_value",
        )
    if "conversation" in body:
        raise bad_request("`conversation` is for chats; here it is `previous_response_id`.", "conversation")
    chat = {field: body[field] for field in _OURS if field in body}
    chat["messages"] = _messages(body)
    if "max_output_tokens" in body:
        chat["max_tokens"] = body["max_output_tokens"]
    reasoning = body.get("reasoning", {})
    if not isinstance(reasoning, dict):
        raise bad_request("`reasoning` must be an object.", "reasoning")
    effort = reasoning.get("effort", body.get("reasoning_effort"))
    if effort is not None:
        chat["reasoning_effort"] = effort
    if tools := body.get("tools"):
        chat["tools"] = [{"type": "function", "function": tool} for tool in tools]
    text = body.get("text", {})
    if not isinstance(text, dict):
        raise bad_request("`text` must be an object.", "text")
    if isinstance(form := text.get("format"), dict):
        chat["response_format"] = {"type": form.get("type"), "json_schema": form}
    if "structured_outputs" in body:
        chat["structured_outputs"] = body["structured_outputs"]
    return chat


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    instructions, given = body.get("instructions"), body.get("input")
    if not isinstance(instructions, str | None):
        raise bad_request("`instructions` must be a string.", "instructions")
    if not isinstance(given, str | list) or given == []:
        raise bad_request("`input` must be a string, or an array of items.", "input")
    messages = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for index, item in enumerate(given):
        if not isinstance(item, dict):
            raise bad_request(f"`input[{index}]` must be an object.", f"input[{index}]")
        if message := _message(item):
            if not isinstance(message["role"], str) or not isinstance(message["content"], str | list | None):
                raise bad_request(f"`input[{index}]` is no message and no other known item.", f"input[{index}]")
            messages.append(message)
    if not messages:
        raise bad_request("`input` holds nothing to answer.", "input")
    return messages


def _message(item: dict[str, Any]) -> dict[str, Any] | None:
    """The chat message of an item, if it is one that is read here."""
    kind = item.get("type", "message")
    if kind in _CALLS:
        function = {"name": item.get("name"), "arguments": item.get("arguments", item.get("input"))}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind in _RESULTS:
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
    return {"role": item.get("role"), "content": item.get("content")} if kind == "message" else None
