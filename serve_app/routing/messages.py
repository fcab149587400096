"""A body of Anthropic's Messages API in the words of the chat API, for whoever decides; it is never sent. Pure.

https://docs.anthropic.com/en/api/messages, as far as vLLM 0.32 answers it.
"""

from __future__ import annotations

from typing import Any, get_args

from serve_app.errors import bad_request
from serve_app.model_schema import Effort

_OURS = ("model", "stream", "max_tokens", "chat_template_kwargs", "mode", "thinking_token_budget", "conversation")
_ROLES = ("user", "assistant", "system")
_THINKING = ("enabled", "disabled", "adaptive")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_MOST_MESSAGES = 10_000
# Claude Code says these beside what a tool answered; the turn is still the one before.
_REMINDER = ("<system-reminder>", "</system-reminder>")

Body = dict[str, Any]


def as_chat(body: Body, *, generates: bool = True) -> Body:
    """The chat body that asks the same. Raises `ApiError` (400) for what has not the form of the API.

    `generates`: it is to be answered, and not only counted.
    """
    if generates and "max_tokens" not in body:
        raise bad_request("`max_tokens` is needed: the most tokens that the answer may have.", "max_tokens")
    chat = {field: body[field] for field in _OURS if field in body}
    chat["messages"] = [*_system(body), *_messages(body)]
    if tools := _tools(body):
        chat["tools"] = tools
    if choice := _tool_choice(body):
        chat["tool_choice"] = choice
    if "stop_sequences" in body:
        chat["stop"] = body["stop_sequences"]
    asked = _thinking(body)
    if (effort := _effort(body)) and not adaptive_effort(body):
        chat["reasoning_effort"] = effort
    if asked:
        chat["thinking"] = asked
    if form := _object(_object(body, "output_config"), "format", "output_config.format"):
        chat["response_format"] = {"type": form.get("type"), "json_schema": {"schema": form.get("schema")}}
    user = _object(body, "metadata").get("user_id")
    return {**chat, "user": user} if isinstance(user, str) else chat


def adaptive_effort(body: Body) -> str | None:
    """How much to think at most where `thinking` is `adaptive`, which leaves it to the router whether to think."""
    asked, effort = _thinking(body), _effort(body)
    return effort if effort != "none" and asked and asked["type"] == "adaptive" else None


def _thinking(body: Body) -> Body | None:
    asked = body.get("thinking")
    if asked is None:
        return None
    if not isinstance(asked, dict) or asked.get("type") not in _THINKING:
        raise bad_request(f"`thinking` must be an object whose `type` is one of {', '.join(_THINKING)}.", "thinking")
    budget = asked.get("budget_tokens")
    if asked["type"] == "enabled" and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 1):
        field = "thinking.budget_tokens"
        raise bad_request(f"`{field}` must be a whole number of at least 1.", field)
    return asked


def _effort(body: Body) -> str | None:
    effort = _object(body, "output_config").get("effort", body.get("reasoning_effort"))
    if effort is not None and effort not in get_args(Effort):
        field = "output_config.effort"
        raise bad_request(f"`{field}` must be one of {', '.join(get_args(Effort))}.", field)
    return effort


def _object(body: Body, field: str, name: str = "") -> Body:
    value = body.get(field)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad_request(f"`{name or field}` must be an object.", name or field)
    return value


def _tools(body: Body) -> list[Body]:
    tools = []
    for index, tool in enumerate(body.get("tools", ())):
        field = f"tools[{index}]"
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
            raise bad_request(f"`{field}` must be an object with a `name`.", field)
        if not isinstance(schema := tool.get("input_schema"), dict):
            # Anthropic's own tools (web search and so on) run on its servers.
            raise bad_request(f"`{field}.input_schema` must be an object.", f"{field}.input_schema")
        function = {"name": tool["name"], "description": tool.get("description"), "parameters": schema}
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(body: Body) -> str | Body | None:
    choice = _object(body, "tool_choice")
    if not choice:
        return None
    if choice.get("type") == "tool" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    if not isinstance(choice.get("type"), str) or choice["type"] not in _CHOICES:
        raise bad_request(
            "`tool_choice` must be an object whose `type` is auto, any, none, or tool with a `name`.", "tool_choice"
        )
    return _CHOICES[choice["type"]]


def _system(body: Body) -> list[Body]:
    given = body.get("system")
    if not given:
        return []
    if not isinstance(given, str) and not _are_blocks(given):
        raise bad_request("`system` must be a string, or an array of text blocks.", "system")
    return [{"role": "system", "content": given}]


def _messages(body: Body) -> list[Body]:
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise bad_request("`messages` must be an array of at least one message.", "messages")
    if len(given) > _MOST_MESSAGES:
        raise bad_request(f"`messages` has more than {_MOST_MESSAGES} messages.", "messages")
    messages: list[Body] = []
    for index, message in enumerate(given):
        field = f"messages[{index}]"
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise bad_request(f"`{field}` must be an object with the `role` user or assistant.", field)
        content = message.get("content")
        if not isinstance(content, str) and not _are_blocks(content):
            raise bad_request(f"`{field}.content` must be a string or an array of blocks.", f"{field}.content")
        if isinstance(content, list):
            messages += _of_blocks(message["role"], content)
        else:
            messages.append({"role": message["role"], "content": content})
    return messages


def _are_blocks(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(block, dict)
        and isinstance(block.get("type"), str)
        and (block["type"] != "text" or isinstance(block.get("text"), str))
        for block in value
    )


def _of_blocks(role: str, blocks: list[Body]) -> list[Body]:
    """Its chat messages: what tools answered comes before what the user says beside it, as vLLM has it."""
    results = [
        {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")}
        for block in blocks
        if block["type"] == "tool_result"
    ]
    said = [block for block in blocks if block["type"] in ("text", "image")]
    if results and all(map(_is_reminder, said)):
        return results
    message: Body = {"role": role, "content": said}
    if calls := [_call(block) for block in blocks if block["type"] == "tool_use"]:
        message["tool_calls"] = calls
    return [*results, message]


def _call(block: Body) -> Body:
    function = {"name": block.get("name"), "arguments": block.get("input")}
    return {"id": block.get("id"), "type": "function", "function": function}


def _is_reminder(block: Body) -> bool:
    text = str(block.get("text", "")).strip()
    return text.startswith(_REMINDER[0]) and text.endswith(_REMINDER[1])
