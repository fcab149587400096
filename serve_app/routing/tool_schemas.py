"""Schemas as generators and older drafts write them, in the words that an engine compiles: tools' above all. Pure.

Arguments are held to them by a grammar (`tool_strict_level: parameter`), and one tool that xgrammar (of vLLM 0.32)
cannot compile makes a 400 of every request that offers it, called or not: an agent that loads such a server of tools
has none. So what means the same is said in today's words, and what cannot be held is left out: the model's own care
remains, as it is without a grammar. Of an answer's schema nothing is left out; it is a promise.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from serve_app.errors import bad_request

Body = dict[str, Any]
Schema = dict[str, Any]

_DEEPEST = 64
_TYPES = {
    **{name: name for name in ("object", "array", "string", "number", "integer", "boolean", "null")},
    **{"dict": "object", "map": "object", "list": "array", "tuple": "array", "str": "string", "text": "string"},
    **{"int": "integer", "long": "integer", "float": "number", "double": "number", "bool": "boolean", "none": "null"},
}
# Where null is a value.
_ANY_VALUE = frozenset({"const", "default", "example", "examples"})
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "additionalItems", "unevaluatedProperties", "propertyNames")
_LENGTHS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_PAIRS = (("minimum", "maximum"), ("minLength", "maxLength"), ("minItems", "maxItems"))
_LARGEST = 2**63
# Lookbehind, groups with flags and other extensions, references back, classes and names of Unicode, borders, empty
# classes, and braces that repeat nothing.
_UNREAD = re.compile(r"\(\?<[=!]|\(\?P=|\(\?[^:=!<P]|\\[1-9kpPbBAZzGQERN]|\[\^?\]|(?<!\\)\{(?!\d{1,5}(?:,\d{0,5})?\})")
_NAMED_GROUP = re.compile(r"\(\?<(?=[A-Za-z_])")
_GONE = object()


def with_schemas_compiled(body: Body, endpoint: str) -> Body:
    """The body with such schemas in its (checked) tools; the same object where nothing is to be done.

    Raises `ApiError` (400) as `compiled` does.
    """
    tools = body.get("tools")
    if not isinstance(tools, list):
        return body
    changed = [_tool(tool, f"tools[{index}]", endpoint) for index, tool in enumerate(tools)]
    return {**body, "tools": changed} if any(new is not old for new, old in zip(changed, tools, strict=True)) else body


def _tool(tool: Any, place: str, endpoint: str) -> Any:
    if not isinstance(tool, dict):
        return tool
    if endpoint == "chat":
        function = _owner(tool["function"], "parameters", f"{place}.function")
        return tool if function is tool["function"] else {**tool, "function": function}
    return _owner(tool, "parameters" if endpoint == "responses" else "input_schema", place)


def _owner(owner: Body, field: str, place: str) -> Body:
    schema = {} if owner.get(field) == [] else owner.get(field)
    if not isinstance(schema, dict):
        return owner
    made = compiled(schema, f"{place}.{field}", strict=owner.get("strict") is True)
    return owner if made is owner[field] else {**owner, field: made}


def compiled(schema: Schema, place: str, *, strict: bool = False) -> Schema:
    """The schema with only what can be compiled; the same object where that is all of it.

    Raises `ApiError` (400) that names the place where something had to go and the client wants it held (`strict`).
    """
    reading = _Reading(schema)
    made = reading.schema(schema, 0)
    if strict and reading.left_out:
        raise bad_request(
            f"`{place}` holds what arguments cannot be held to here, and `strict` asks for it.",
            place,
            "unsupported_schema",
        )
    return made if isinstance(made, dict) else {}


def in_words_of_today(schema: Schema) -> Schema:
    """An answer's schema: as `compiled`, but where something would have to go it stays, for the engine to refuse."""
    reading = _Reading(schema)
    made = reading.schema(schema, 0)
    return made if isinstance(made, dict) and not reading.left_out else schema


@dataclasses.dataclass(slots=True)
class _Reading:
    """One schema on its way. `left_out`: something of it could not be kept."""

    root: Schema
    left_out: bool = False

    def schema(self, node: Any, depth: int) -> Any:
        """It or one within it. What is none, or lies too deep to be looked at, allows everything."""
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict) or depth > _DEEPEST:
            self.left_out = True
            return True
        made = _modern(node)
        changed = {}
        for key, value in made.items():
            if (kept := self._kept(key, value, depth + 1)) is not value:
                changed[key] = kept
        if changed:
            # What is null was never said.
            self.left_out |= any(kept is _GONE and made[key] is not None for key, kept in changed.items())
            made = {key: kept for key, value in made.items() if (kept := changed.get(key, value)) is not _GONE}
        return self._bounded(made)

    def _kept(self, key: str, value: Any, depth: int) -> Any:
        if value is None:
            return value if key in _ANY_VALUE else _GONE
        if key in _MAPS:
            return self._named(value, depth)
        if key in _LISTS:
            return self._listed(value, depth)
        if key in _SCHEMAS:
            return self.schema(value, depth)
        if key == "$ref":
            leads = isinstance(value, str) and (not value.startswith("#/") or _leads(value, self.root))
            return value if leads else _GONE
        return check(value) if (check := _VALUES.get(key)) else value

    def _named(self, value: Any, depth: int) -> Any:
        if value == []:
            return {}  # as PHP writes an empty object
        if not isinstance(value, dict):
            return _GONE
        schemas = {name: self.schema(each, depth) for name, each in value.items()}
        if all(schemas[name] is each and each is not False for name, each in value.items()):
            return value
        return {name: each for name, each in schemas.items() if each is not False}

    def _listed(self, value: Any, depth: int) -> Any:
        if not isinstance(value, list) or not value:
            return _GONE
        schemas = [self.schema(each, depth) for each in value]
        return value if all(new is old for new, old in zip(schemas, value, strict=True)) else schemas

    def _bounded(self, node: Schema) -> Schema:
        """With bounds of whole numbers that are whole and not too large, and none that contradict each other."""
        kinds = node.get("type")
        if kinds == "integer" or (isinstance(kinds, list) and "integer" in kinds):
            for key in _BOUNDS:
                if isinstance(value := node.get(key), float):
                    node = _with_whole_bound(node, key, value)
            if too_large := [key for key in _BOUNDS if abs(node.get(key, 0)) >= _LARGEST]:
                node = self._without(node, too_large)
        for low, high in _PAIRS:
            if low in node and high in node and node[low] > node[high]:
                node = self._without(node, (low, high))
        return node

    def _without(self, node: Schema, keys: tuple[str, ...] | list[str]) -> Schema:
        self.left_out = True
        return {key: value for key, value in node.items() if key not in keys}


def _with_whole_bound(node: Schema, key: str, value: float) -> Schema:
    if value.is_integer():
        return {**node, key: int(value)}
    # Above 0.5 begins at 1, whether 0.5 itself may be or not.
    lower = key in ("minimum", "exclusiveMinimum")
    rest = {name: bound for name, bound in node.items() if name != key}
    return {**rest, "minimum" if lower else "maximum": math.ceil(value) if lower else math.floor(value)}


def _modern(node: Schema) -> Schema:
    """What drafts 3 to 7 and OpenAPI say in other words than draft 2020-12; the same object where there is none."""
    made = node
    for bound in ("Minimum", "Maximum"):
        if isinstance(exclusive := made.get(f"exclusive{bound}"), bool):
            made = {key: value for key, value in made.items() if key != f"exclusive{bound}"}
            if exclusive and bound.lower() in made:
                made[f"exclusive{bound}"] = made.pop(bound.lower())
    if isinstance(items := made.get("items"), list):
        made = {key: value for key, value in made.items() if key not in ("items", "additionalItems")}
        if items:
            made["prefixItems"] = items
        if "additionalItems" in node:
            made["items"] = node["additionalItems"]
    if isinstance(made.get("required"), bool):
        made = {key: value for key, value in made.items() if key != "required"}
    return made


def _type(value: Any) -> Any:
    if isinstance(value, str):
        known = _TYPES.get(value.lower(), _GONE)
        return value if known == value else known
    if isinstance(value, list) and value and all(isinstance(name, str) and name.lower() in _TYPES for name in value):
        names = [_TYPES[name.lower()] for name in value]
        return value if names == value else names
    return _GONE


def _required(value: Any) -> Any:
    return value if isinstance(value, list) and all(isinstance(name, str) for name in value) else _GONE


def _enum(value: Any) -> Any:
    return value if isinstance(value, list) and value else _GONE


def _pattern(value: Any) -> Any:
    if not isinstance(value, str) or _UNREAD.search(value):
        return _GONE
    try:
        re.compile(_NAMED_GROUP.sub("(?P<", value))
    except (re.error, RecursionError, OverflowError):
        return _GONE
    return value


def _format(value: Any) -> Any:
    return value if isinstance(value, str) else _GONE


def _length(value: Any) -> Any:
    if not _is_number(value) or value != value // 1 or not 0 <= value < _LARGEST:
        return _GONE
    return value if isinstance(value, int) else int(value)


def _bound(value: Any) -> Any:
    return value if _is_number(value) else _GONE


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_VALUES: Mapping[str, Callable[[Any], Any]] = {
    "type": _type,
    "required": _required,
    "enum": _enum,
    "pattern": _pattern,
    "format": _format,
    **dict.fromkeys(_LENGTHS, _length),
    **dict.fromkeys(_BOUNDS, _bound),
}


def _leads(ref: str, root: Any) -> bool:
    node = root
    for part in ref.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and name in node:
            node = node[name]
        elif isinstance(node, list) and re.fullmatch("[0-9]{1,6}", name) and int(name) < len(node):
            node = node[int(name)]
        else:
            return False
    return node is not None
