"""The decision: which model answers, and whether it thinks, each with its source. Pure."""

from __future__ import annotations

from serve_app.routing.decision import Decision, Setting
from serve_app.routing.facts import Facts
from serve_app.routing.model_choice import ModelChoice, able_default, check_fit, choose_model, named_model
from serve_app.routing.policy import Policy
from serve_app.routing.reading import Reading
from serve_app.routing.thinking import wishes
from serve_app.routing.thinking_choice import choose_thinking, judged


def decide(facts: Facts, policy: Policy, setting: Setting) -> Decision:
    """Decide one request. Raises `ApiError` for what no model can do; the client's own choice always wins."""
    reading = Reading(facts, policy, setting)
    named, source, profile = named_model(reading)
    if facts.excerpt is None:
        model = named or able_default(reading)
        check_fit(facts, model, setting.tokens)
        # Raw text has no template, and so no switch.
        return Decision(model.id, source, False, facts.endpoint, steps=tuple(reading.steps))
    if named:
        chosen = ModelChoice(named, source)
        said = wishes(facts, named.thinking)
    else:
        default = policy.catalog.models[policy.catalog.default_id]
        said = wishes(facts, default.thinking)
        first = said[0] if said else profile
        chosen = choose_model(reading, must_think=first is not None and first.thinking)
        if said and chosen.model is not default:
            said = wishes(facts, chosen.model.thinking)  # in its own efforts
    check_fit(facts, chosen.model, setting.tokens)
    if profile:
        said.append(profile)
    mode = choose_thinking(reading, chosen.model, said)
    thinking_rule, model_rule = reading.rules() if "rule" in (mode.source, chosen.source) else (None, None)
    rule = thinking_rule if mode.source == "rule" else model_rule
    return Decision(
        model_id=chosen.model.id,
        model_source=chosen.source,
        thinking=mode.thinking,
        thinking_source=mode.source,
        # vLLM's Responses API (0.32) takes the switch, but no budget.
        budget=None if facts.endpoint == "responses" else mode.budget,
        wanted_budget=mode.wanted_budget,
        rule=rule.name if rule else None,
        score=reading.score,
        better=chosen.better.id if chosen.better else None,
        better_is_small=chosen.better is not None and chosen.better.id == policy.settings.small_model,
        fallback=chosen.fallback,
        judged=judged(reading, mode.source),
        undecided=reading.score is not None and setting.score is None,
        warnings=mode.warnings,
        steps=tuple(reading.steps),
    )
