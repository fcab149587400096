"""Finds JSON schemas that no answer can satisfy, or none is held to, and that engines accept all the same. Pure.

Everything else about schemas is the engine's to judge.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from serve_app.errors import bad_request

_MOST_NODES = 20_000
# xgrammar passes over them (tried with the one of vLLM 0.32): the answer would not be held to its schema.
_UNHELD = ("not", "if")
# What stands below these is no schema, or a map of schemas by names of the client's own.
_VALUES = frozenset({"const", "enum", "default", "examples"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_INDEX = re.compile("[0-9]{1,9}")


def check_schemas(body: dict[str, Any]) -> None:
    """Raise `ApiError` (400) for a schema with a reference that leads back to itself and nowhere else.

    vLLM 0.32 begins to answer it (vllm-project/vllm#57725); no finite value fits. And for an answer's schema that says
    what no engine here would see to. (A tool's may: it helps the model all the same.)
    """
    for field, schema in _answer_schemas(body):
        if keyword := unheld_keyword(schema):
            raise bad_request(
                f"`{field}`: the schema's `{keyword}` cannot be held here; leave it out.", field, "unsupported_schema"
            )
    for field, schema in (*_answer_schemas(body), *_tool_schemas(body)):
        if ref := endless_reference(schema):
            raise bad_request(
                f"`{field}`: the schema's reference at {ref} refers to itself; no value fits it.",
                field,
                "invalid_schema",
            )


def _answer_schemas(body: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    wanted = body.get("response_format")
    if isinstance(wanted, dict) and isinstance(wrapper := wanted.get("json_schema"), dict):
        yield "response_format", wrapper.get("schema")
    elif isinstance(wanted, dict):
        yield "response_format", wanted.get("schema")
    held = body.get("structured_outputs")
    if isinstance(held, dict) and isinstance(held.get("json"), dict):
        yield "structured_outputs", held["json"]
    if isinstance(body.get("guided_json"), dict):
        yield "guided_json", body["guided_json"]


def _tool_schemas(body: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for index, tool in enumerate(body.get("tools") or ()):
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("parameters"), dict):
            yield f"tools[{index}].function.parameters", function["parameters"]


def unheld_keyword(schema: Any) -> str | None:
    """A keyword that the answer would not be held to: `not`, `if`, or a `$ref` to somewhere else; None without one."""
    pending = [schema]
    for _ in range(_MOST_NODES):
        if not pending:
            return None
        node = pending.pop()
        if isinstance(node, list):
            pending += node
        elif isinstance(node, dict):
            if found := next((keyword for keyword in _UNHELD if keyword in node), None):
                return found
            if isinstance(ref := node.get("$ref"), str) and not ref.startswith("#"):
                return "$ref"
            for keyword, below in node.items():
                if keyword in _MAPS and isinstance(below, dict):
                    pending += below.values()
                elif keyword not in _VALUES:
                    pending.append(below)
    return None


def endless_reference(schema: Any) -> str | None:
    """How deep such a reference stands (its path would repeat the client's own words); None without one."""
    pending = [(schema, 0)]
    ending: set[str] = set()
    for _ in range(_MOST_NODES):
        if not pending:
            return None
        node, depth = pending.pop()
        if isinstance(node, list):
            pending += [(item, depth + 1) for item in node]
        elif isinstance(node, dict):
            if _leads_to_itself(node, schema, ending):
                return f"depth {depth}"
            pending += [(item, depth + 1) for item in node.values()]
    return None


def _leads_to_itself(node: dict[str, Any], root: Any, ending: set[str]) -> bool:
    """`ending`: references known to lead somewhere; each is followed once."""
    seen: set[str] = set()
    while isinstance(node, dict) and isinstance(ref := node.get("$ref"), str) and ref.startswith("#"):
        if ref in seen:
            return True
        if ref in ending:
            break
        seen.add(ref)
        node = _resolved(ref, root)
    ending |= seen
    return False


def _resolved(ref: str, root: Any) -> Any:
    if ref != "#" and not ref.startswith("#/"):
        return None  # an anchor
    node = root
    for part in ref[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(part)
        elif isinstance(node, list) and _INDEX.fullmatch(part) and int(part) < len(node):
            node = node[int(part)]
        else:
            return None
    return node
