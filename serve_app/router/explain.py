"""Says why: the `x-router-*` headers of every answer; with `x-router-debug` the facts of the request too."""

from __future__ import annotations

import hashlib
from collections.abc import MutableMapping

from starlette.datastructures import Headers

from serve_app.config import Config
from serve_app.router.decider import Decided
from serve_app.routing.decision import Decision
from serve_app.routing.facts import Facts
from serve_app.routing.rules import tasks_of


class Explain:
    """Writes the headers. `policy`: a hash of the configuration."""

    def __init__(self, policy: str) -> None:
        self._policy = policy

    def __call__(self, out: MutableMapping[str, str], decided: Decided, headers: Headers) -> None:
        """Add the headers that explain a decision."""
        decision = decided.decision
        out["x-router-model"] = decision.model_id
        out["x-router-model-source"] = decision.model_source
        out["x-router-thinking"] = _on(decision.thinking)
        out["x-router-thinking-source"] = decision.thinking_source
        out["x-router-decision-ms"] = f"{decided.seconds * 1000:.3f}"
        out["x-router-policy"] = self._policy
        if decision.budget is not None:
            out["x-router-budget"] = str(decision.budget)
        if decision.rule:
            out["x-router-rule"] = decision.rule
        if decision.score:
            out["x-router-score"] = f"{decision.score.think:.3f}"
            out["x-router-scorer"] = decision.score.kind
        if decision.fallback:
            out["x-router-fallback"] = decision.fallback
        if decision.warnings:
            out["x-router-warning"] = "; ".join(decision.warnings)
        if shadowed := decided.shadowed:
            out["x-router-shadow"] = _shadow(shadowed)
        if decided.wait_s is not None:
            out["preference-applied"] = f"wait={decided.wait_s:g}"
        if headers.get("x-router-debug", "").lower() == "true":
            out["x-router-facts"] = facts_in_words(decided.facts)


def _shadow(decision: Decision) -> str:
    return (
        f"model={decision.model_id}; model-source={decision.model_source};"
        f" thinking={_on(decision.thinking)}; thinking-source={decision.thinking_source}"
    )


def facts_in_words(facts: Facts) -> str:
    """What rules and scorer see of a request, without a word of its text."""
    excerpt = facts.excerpt
    if excerpt is None:
        return f"endpoint={facts.endpoint}"
    said = {
        "endpoint": facts.endpoint,
        "language": excerpt.language,
        "tasks": ",".join(sorted(tasks_of(excerpt.instruction))) or "none",
        "turns": excerpt.turns,
        "ask-tokens": excerpt.ask_tokens,
        "prompt-tokens": excerpt.prompt_tokens,
        "tools": len(excerpt.tool_names),
        "tool-loop": _yes(excerpt.in_tool_loop),
        "json-schema": _yes(facts.json_schema),
        "images": _yes(excerpt.images),
        "system": _yes(bool(excerpt.system)),
        "max-tokens": facts.max_tokens if facts.max_tokens is not None else "none",
    }
    return "; ".join(f"{name}={value}" for name, value in said.items())


def _on(thinking: bool) -> str:
    return "on" if thinking else "off"


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


def policy_hash(config: Config) -> str:
    """Twelve hex digits that change with the configuration."""
    return hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:12]
