"""What holds an answer to a form, in the words of other servers and older vLLM: said in vLLM's own, or refused. Pure.

Each of them vLLM (0.32) would ignore, and answer free text to a client that relies on a form.
"""

from __future__ import annotations

from typing import Any

from serve_app.errors import bad_request
from serve_app.routing.tool_schemas import in_words_of_today

# vLLM's own until 0.12 (vllm-project/vllm#53975).
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}
# Ollama, llama.cpp and SGLang; and OpenAI's API before it had tools.
_FOREIGN = {
    "ebnf": "`structured_outputs.grammar`",
    "format": "`response_format`",
    "function_call": "`tool_choice`",
    "functions": "`tools`",
    "grammar": "`structured_outputs.grammar`",
    "json_schema": "`response_format`",
    "regex": "`structured_outputs.regex`",
}


_FORMS = frozenset({"choice", "grammar", "json", "json_object", "regex", "structural_tag"})
_KINDS = frozenset({"json_object", "json_schema", "structural_tag", "text"})


def asks_for_form(body: dict[str, Any]) -> bool:
    """Whether the answer is held to a form."""
    if any(body.get(field) is not None for field in ("structured_outputs", *_GUIDED)):
        return True
    wanted = body.get("response_format")
    return isinstance(wanted, dict) and wanted.get("type") not in (None, "text")


def with_constraints_in_place(body: dict[str, Any]) -> dict[str, Any]:
    """The body with its constraint where vLLM looks for it. Raises `ApiError` (400) for two, or one it cannot know."""
    for field, instead in _FOREIGN.items():
        if body.get(field) and not (field == "function_call" and body[field] in ("none", "auto")):
            raise bad_request(f"`{field}` has no meaning here; use {instead}.", field, "unsupported_field")
    guided = {field: body[field] for field in _GUIDED if body.get(field) is not None}
    held, wanted = body.get("structured_outputs"), body.get("response_format")
    # Besides a form it may say how white space is written.
    forms = len(guided) + (isinstance(held, dict) and bool(guided or not _FORMS.isdisjoint(held)))
    if forms + (isinstance(wanted, dict) and wanted.get("type") not in (None, "text")) > 1:
        raise bad_request("An answer can be held to one form only; there are several.", "structured_outputs")
    body = {field: value for field, value in body.items() if field not in _GUIDED and field not in _FOREIGN}
    for field, value in guided.items():
        body["structured_outputs"] = {_GUIDED[field]: value}
    return _with_schema_in_place(body)


def _with_schema_in_place(body: dict[str, Any]) -> dict[str, Any]:
    """A schema where OpenAI's chat API has it.

    Llama.cpp and Together write `{"type": "json_object", "schema": ...}`, the Responses API and others put it beside
    `json_schema`, and many leave out its name.
    """
    wanted = body.get("response_format")
    if not isinstance(wanted, dict):
        return body
    kind = wanted.get("type")
    if not isinstance(kind, str) or kind not in _KINDS:
        field = "response_format.type"
        raise bad_request(f"`{field}` must be one of {', '.join(sorted(_KINDS))}.", "response_format")
    wrapper = wanted.get("json_schema")
    if wrapper is None and wanted.get("schema") is not None and kind in ("json_object", "json_schema"):
        wrapper = {name: value for name, value in wanted.items() if name not in ("type", "json_schema")}
    elif kind != "json_schema":
        return body
    if not isinstance(wrapper, dict) or not isinstance(schema := wrapper.get("schema"), dict):
        raise bad_request("`response_format.json_schema` must be an object that has a `schema`.", "response_format")
    wrapper = {"name": "schema", **wrapper, "schema": in_words_of_today(schema)}
    return {**body, "response_format": {"type": "json_schema", "json_schema": wrapper}}
