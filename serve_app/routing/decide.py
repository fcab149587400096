"""The decision: which model answers, and whether it thinks, each with its source. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any

from serve_app.catalog import AUTO, Catalog
from serve_app.config import Model
from serve_app.errors import ApiError, bad_request, model_not_found
from serve_app.routing.facts import Facts
from serve_app.routing.thinking import Wish, wishes

_PROFILES = {"think": True, "fast": False}
# Of a client's max_tokens this share stays free for the answer when it names a thinking budget too.
_ANSWER_SHARE = 0.25
# Said to the router, not to an engine; what they mean reaches it as the hard switch and the budget.
_ROUTER_FIELDS = ("mode", "reasoning_effort", "thinking_token_budget")


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """Which model answers and whether it thinks. `budget`: thinking tokens, None for no limit.

    `warnings` are for the client: what it said that could not be followed, or contradicted itself.
    """

    model_id: str
    model_source: str
    thinking: bool
    thinking_source: str
    budget: int | None = None
    warnings: tuple[str, ...] = ()


def decide(facts: Facts, catalog: Catalog) -> Decision:
    """Decide one request. Raises `ApiError` for what no model can do; the client's own choice always wins."""
    model, source, profile = _choose_model(facts, catalog)
    _check_fit(facts, model)
    said = wishes(facts, model.thinking)
    if profile:
        said.append(profile)
    if facts.endpoint != "chat":
        # Raw text has no template, and so no switch.
        return Decision(model.id, source, False, facts.endpoint)
    if not model.thinking.supported:
        asked = next((wish for wish in said if wish.thinking), None)
        warning = f"{model.id} cannot think; {asked.source} was not followed" if asked else ""
        return Decision(model.id, source, False, "unsupported", warnings=(warning,) if asked else ())
    if not said:
        return Decision(model.id, source, model.thinking.default, "default")
    winner = said[0]
    warnings = tuple(
        f"{winner.source} overrides {wish.source}" for wish in said[1:] if wish.thinking != winner.thinking
    )
    return Decision(
        model.id,
        source,
        winner.thinking,
        winner.source,
        budget=_budget(said, facts.max_tokens),
        warnings=warnings,
    )


def _choose_model(facts: Facts, catalog: Catalog) -> tuple[Model, str, Wish | None]:
    name = facts.model
    if name is None or name == AUTO:
        return _default_model(facts, catalog), "default", None
    if model := catalog.find(name):
        return model, "explicit" if model.id == name else "alias", None
    # Profiles come last, so that ids which themselves hold a colon keep working.
    base, _, suffix = name.rpartition(":")
    if suffix in _PROFILES:
        profile = Wish(_PROFILES[suffix], "profile")
        if base == AUTO:
            return _default_model(facts, catalog), "default", profile
        if model := catalog.find(base):
            return model, "explicit" if model.id == base else "alias", profile
    raise model_not_found()


def _default_model(facts: Facts, catalog: Catalog) -> Model:
    """The resident model; for what it cannot do, the first one that can."""
    default = catalog.models[catalog.default_id]
    if facts.endpoint in default.abilities:
        return default
    return next((model for model in catalog.models.values() if facts.endpoint in model.abilities), default)


def _check_fit(facts: Facts, model: Model) -> None:
    if facts.endpoint not in model.abilities:
        raise bad_request(f"{model.id} does not do {facts.endpoint}.", "model", "unsupported_model")
    if facts.max_tokens is not None and facts.max_tokens >= model.context:
        raise ApiError(
            400,
            f"{model.id} has a context of {model.context} tokens; {facts.max_tokens} for the answer leave"
            " no room for the prompt.",
            param="max_tokens",
            code="context_length_exceeded",
        )


def _budget(said: list[Wish], max_tokens: int | None) -> int | None:
    """The strongest budget that agrees with the winner, cut so that the answer keeps its share."""
    winner = said[0]
    if not winner.thinking:
        return None
    wish = next((wish for wish in said if wish.thinking and (wish.budget or wish.unlimited)), None)
    if wish is None or wish.budget is None:
        return None
    if max_tokens is None:
        return wish.budget
    return max(1, min(wish.budget, int(max_tokens * (1 - _ANSWER_SHARE))))


def engine_body(facts: Facts, decision: Decision, model: Model) -> dict[str, Any]:
    """The body for the engine: the client's, with the model's id, the hard switch and what it left unset.

    "Not thinking" is said explicitly (Qwen3 thinks by default). All other fields pass as they came.
    """
    body = {**facts.body, "model": model.id}
    for field in _ROUTER_FIELDS:
        body.pop(field, None)
    if not body.get("tools"):
        # As OpenAI does it: no tools is no tools, however it is said. (vLLM refuses an empty list.)
        body.pop("tools", None)
        if body.get("tool_choice") in ("none", "auto"):
            del body["tool_choice"]
    if facts.endpoint == "chat" and model.thinking.supported:
        body["chat_template_kwargs"] = {
            **body.get("chat_template_kwargs", {}),
            "enable_thinking": decision.thinking,
        }
        if decision.budget is not None:
            body["thinking_token_budget"] = decision.budget
    if facts.endpoint == "embeddings":
        return body
    sampling = model.sampling.thinking if decision.thinking else model.sampling.plain
    return {**sampling.values(), **body}
