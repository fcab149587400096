"""Whether a request thinks first, and how much. Pure.

In this order: what the model can, what the client said, what the conversation keeps, rules, scorer, default.
"""

from __future__ import annotations

import dataclasses

from serve_app.model_schema import Model
from serve_app.routing.reading import ESTIMATE_ERROR, Reading
from serve_app.routing.thinking import Wish

# Of the tokens that an answer may have this share stays free of thinking.
_ANSWER_SHARE = 0.25


@dataclasses.dataclass(frozen=True, slots=True)
class ThinkingChoice:
    """Whether to think, who chose it, how many tokens at most, and what the client must know."""

    thinking: bool
    source: str
    budget: int | None = None
    wanted_budget: int | None = None
    warnings: tuple[str, ...] = ()


def choose_thinking(reading: Reading, model: Model, said: list[Wish]) -> ThinkingChoice:
    """Choose the mode. `said`: what the client said about it, strongest first."""
    if not model.thinking.supported:
        asked = next((wish for wish in said if wish.thinking), None)
        warning = f"{model.id} cannot think; {asked.source} was not followed" if asked else ""
        reading.say("constraint", "thinking", f"off: {model.id} cannot think")
        return ThinkingChoice(False, "unsupported", warnings=(warning,) if asked else ())
    if said:
        winner = said[0]
        warnings = tuple(
            f"{winner.source} overrides {wish.source}" for wish in said[1:] if wish.thinking != winner.thinking
        )
        reading.say("explicit", "thinking", f"{_on(winner.thinking)}: {winner.source}")
        wanted = _client_budget(said)
        budget = _clamped(reading, model, wanted) if wanted is not None else None
        return ThinkingChoice(winner.thinking, winner.source, budget, wanted, warnings)
    reading.say("explicit", "thinking", "nothing said")
    thinking, source = _policy_thinking(reading, model)
    wanted = _own_budget(reading, model, source) if thinking else None
    # Where the client did not ask for it, thinking must not eat the answer that it did ask for.
    limit = wanted if wanted is not None or reading.facts.max_tokens is None else model.context
    budget = _clamped(reading, model, limit) if thinking and limit is not None else None
    return ThinkingChoice(thinking, source, budget, wanted)


def _policy_thinking(reading: Reading, model: Model) -> tuple[bool, str]:
    """What the router itself decides."""
    if reading.settings.thinking == "default":
        reading.say("default", "thinking", f"{_on(model.thinking.default)}: {model.id}'s")
        return model.thinking.default, "default"
    excerpt = reading.excerpt
    past = reading.past
    if past and reading.same_turn(past):
        reading.say("sticky", "thinking", f"{_on(past.thinking)}: same turn")
        return past.thinking, "sticky"
    room = reading.facts.max_tokens
    if excerpt.prefilled or (room is not None and room < reading.settings.min_answer_tokens):
        why = "the answer is begun" if excerpt.prefilled else f"{room} tokens are too few"
        reading.say("constraint", "thinking", f"off: {why}")
        return False, "constraint"
    if past and past.judged is not None and reading.follows_up():
        reading.say("sticky", "thinking", f"{_on(past.judged)}: a follow-up, as what it follows")
        return past.judged, "sticky"
    reading.say("sticky", "thinking", "a turn of its own" if past else "a new conversation")
    rule, _ = reading.rules()
    if rule and rule.then.thinking is not None:
        reading.say("rule", "thinking", f"{_on(rule.then.thinking)}: {rule.name}")
        return rule.then.thinking, "rule"
    reading.say("rule", "thinking", "none")
    score = reading.scored()
    threshold = reading.settings.scorer.think_at or score.think_at
    if abs(score.think - threshold) < reading.settings.scorer.abstain:
        reading.say("scorer", "thinking", f"abstains: {score.think:.2f} ({score.kind})")
        reading.say("default", "thinking", f"{_on(model.thinking.default)}: {model.id}'s")
        return model.thinking.default, "default"
    thinking = score.think >= threshold
    reading.say("scorer", "thinking", f"{_on(thinking)}: {score.think:.2f} from {threshold:.2f} ({score.kind})")
    return thinking, "scorer"


def judged(reading: Reading, source: str) -> bool | None:
    """The difficulty of this turn, for follow-ups to inherit; None where the client decided."""
    if source == "sticky":
        return reading.past.judged if reading.past else None
    if source == "rule" and (rule := reading.rules()[0]):
        return rule.then.thinking
    if source in ("scorer", "default") and (score := reading.score):
        return score.think >= (reading.settings.scorer.think_at or score.think_at)
    return None


def _client_budget(said: list[Wish]) -> int | None:
    """The strongest budget that agrees with the winner."""
    if not said[0].thinking:
        return None
    wish = next((wish for wish in said if wish.thinking and (wish.budget or wish.unlimited)), None)
    return wish.budget if wish else None


def _own_budget(reading: Reading, model: Model, source: str) -> int | None:
    """What rule, conversation or configuration say of a budget, and at most what the client would have."""
    budget = _policy_budget(reading, source)
    most = next((tokens for effort, tokens in model.thinking.efforts.items() if effort == reading.facts.effort), None)
    if budget is None or most is None:
        return most if budget is None else budget
    return min(budget, most)


def _policy_budget(reading: Reading, source: str) -> int | None:
    if source == "rule" and (rule := reading.rules()[0]) and rule.then.budget:
        return rule.then.budget
    if source == "sticky" and reading.past and reading.past.budget:
        return reading.past.budget
    return reading.settings.thinking_budget


def _clamped(reading: Reading, model: Model, budget: int) -> int:
    """At most what leaves the answer its share of `max_tokens`, or else of what the context surely has left."""
    room = reading.facts.max_tokens
    if room is None:
        tokens = reading.setting.tokens or int(reading.tokens / ESTIMATE_ERROR)
        room = max(1, model.context - tokens)
    return max(1, min(budget, int(room * (1 - _ANSWER_SHARE))))


def _on(thinking: bool) -> str:
    return "on" if thinking else "off"
