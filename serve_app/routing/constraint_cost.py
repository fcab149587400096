"""Constraints on an answer that take an engine long to compile. Pure.

xgrammar (that of vLLM 0.32) reads a schema in the engine's event loop, and compiles it before the first token. On a
busy core 300 properties with patterns of 500 repetitions took 14 s to read, and 20,000 alternatives 10 s to compile: a
few times as many, and a host that was silent for 30 s is taken for hung.
"""

from __future__ import annotations

from typing import Any

from serve_app.errors import bad_request

MOST_PATTERNS = 64
MOST_ALTERNATIVES = 2_000
_MOST_NODES = 20_000
_FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_choice", "text", "tools")


def check_cost(body: dict[str, Any]) -> None:
    """Raise `ApiError` (400) for more patterns or alternatives than an answer's or a tool's form may have."""
    for field in _FIELDS:
        given = body.get(field)
        if not isinstance(given, dict | list):
            continue
        patterns, alternatives = _counted(given, choice=field == "guided_choice")
        if patterns > MOST_PATTERNS or alternatives > MOST_ALTERNATIVES:
            raise bad_request(
                f"`{field}` may hold {MOST_PATTERNS} patterns and {MOST_ALTERNATIVES} alternatives at most.",
                field,
                "constraint_too_large",
            )


def _counted(given: Any, *, choice: bool) -> tuple[int, int]:
    patterns, alternatives = 0, len(given) if choice else 0
    pending = [given]
    for _ in range(_MOST_NODES):
        if not pending:
            break
        node = pending.pop()
        if isinstance(node, list):
            pending += node
        elif isinstance(node, dict):
            patterns += isinstance(node.get("pattern"), str)
            for keyword in ("enum", "choice", "anyOf", "oneOf"):
                if isinstance(listed := node.get(keyword), list):
                    alternatives += len(listed)
            pending += node.values()
    return patterns, alternatives
