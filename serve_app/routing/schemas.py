"""Finds JSON schemas that no answer can satisfy and that engines accept all the same. Pure.

Everything else about schemas is the engine's to judge.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from serve_app.errors import bad_request

_MOST_NODES = 20_000
_INDEX = re.compile("[0-9]{1,9}")


def check_schemas(body: dict[str, Any]) -> None:
    """Raise `ApiError` (400) for a schema with a reference that leads back to itself and nowhere else.

    vLLM 0.32 begins to answer it (vllm-project/vllm#57725); no finite value fits.
    """
    for field, schema in _schemas(body):
        if ref := endless_reference(schema):
            raise bad_request(
                f"`{field}`: the schema's reference at {ref} refers to itself; no value fits it.",
                field,
                "invalid_schema",
            )


def _schemas(body: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    wanted = body.get("response_format")
    if isinstance(wanted, dict) and isinstance(wrapper := wanted.get("json_schema"), dict):
        yield "response_format", wrapper.get("schema")
    held = body.get("structured_outputs")
    if isinstance(held, dict) and isinstance(held.get("json"), dict):
        yield "structured_outputs", held["json"]
    if isinstance(body.get("guided_json"), dict):
        yield "guided_json", body["guided_json"]
    for index, tool in enumerate(body.get("tools") or ()):
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("parameters"), dict):
            yield f"tools[{index}].function.parameters", function["parameters"]


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
