"""The form of tools and of the choice among them: one way to say it, and what is wrong by its place. Pure."""

from __future__ import annotations

from typing import Any

from serve_app.errors import bad_request

Body = dict[str, Any]

# `any` is Anthropic's and Mistral's word for it.
_CHOICES = {"auto": "auto", "none": "none", "required": "required", "any": "required"}


def with_choice_in_place(body: Body) -> Body:
    """The body with `tool_choice` as OpenAI's chat API and vLLM (0.32) have it; what cannot be read stays.

    Read are the objects of the Messages and the Responses API, which clients send to chats as well, and OpenAI's
    `allowed_tools`, which vLLM does not know: the others are left out then.
    """
    choice = body.get("tool_choice")
    if isinstance(choice, str):
        return {**body, "tool_choice": _CHOICES.get(choice, choice)} if choice == "any" else body
    if not isinstance(choice, dict):
        return body
    kind, name = choice.get("type"), choice.get("name")
    if isinstance(kind, str) and kind in _CHOICES:
        return {**body, "tool_choice": _CHOICES[kind]}
    if kind in ("function", "tool") and "function" not in choice and isinstance(name, str):
        return {**body, "tool_choice": {"type": "function", "function": {"name": name}}}
    return _with_allowed_only(body, choice) if kind == "allowed_tools" else body


def _with_allowed_only(body: Body, choice: Body) -> Body:
    allowed = choice.get("allowed_tools", choice)
    listed = allowed.get("tools") if isinstance(allowed, dict) else None
    if not isinstance(listed, list) or not listed or allowed.get("mode") not in ("auto", "required"):
        return body
    names = [_name(tool) for tool in listed]
    tools = [tool for tool in body.get("tools") or () if _name(tool) in names]
    if None in names or len({_name(tool) for tool in tools}) < len(set(names)):
        return body
    return {**body, "tools": tools, "tool_choice": allowed["mode"]}


def _name(tool: Any) -> str | None:
    """The name of a tool or of a reference to one, which the Responses API writes beside its type."""
    if not isinstance(tool, dict):
        return None
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and name else None


def check_tools(body: Body) -> None:
    """Raise `ApiError` (400) for a tool that is no function, or a choice that is none.

    vLLM (0.32) refuses most of them, in the words of its validator and once it is awake; of a tool without a `function`
    it makes a 500 where one is chosen by its name.
    """
    names = set()
    for index, tool in enumerate(body.get("tools") or ()):
        place = f"tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type", "function") != "function":
            raise bad_request(f"`{place}` must be an object of the type `function`; no other tools are here.", place)
        if not isinstance(tool.get("function"), dict) or (name := _name(tool)) is None:
            raise bad_request(f"`{place}.function` must be an object that has a `name`.", f"{place}.function")
        for field, kind, words in (("description", str, "a string"), ("parameters", dict, "an object")):
            # PHP writes an empty object as an empty list.
            if not isinstance(given := tool["function"].get(field), kind | None) and given != []:
                where = f"{place}.function.{field}"
                raise bad_request(f"`{where}` must be {words}.", where)
        names.add(name)
    choice = body.get("tool_choice")
    if not names or choice is None or (isinstance(choice, str) and choice in _CHOICES):
        return
    by_name = isinstance(choice, dict) and choice.get("type", "function") == "function"
    if not by_name or not isinstance(choice.get("function"), dict) or _name(choice) not in names:
        raise bad_request(
            "`tool_choice` must be none, auto, required, or name a `function` or `allowed_tools` of those in `tools`.",
            "tool_choice",
        )
