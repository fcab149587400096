"""What is decided, and what a decision depends on besides the request and the policy. Plain data. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any

from serve_app.routing.lexical import Score
from serve_app.routing.policy import View
from serve_app.routing.sticky import Past


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One stage of the decision: what it was asked for (`model` or `thinking`), and what it said."""

    step: str
    about: str
    verdict: str


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """Which model answers and whether it thinks. `budget`: thinking tokens, None for no limit;
    `wanted_budget`: the same before it was cut to what the answer leaves.

    `better`: the model that would have answered, were it awake; the caller loads it. `fallback` says so in words.
    `judged`: what rules or scorer thought, for the conversation's memory. `undecided`: a scorer may be asked, and
    the decision made again with its score. `warnings` are for the client: what could not be followed.
    """

    model_id: str
    model_source: str
    thinking: bool
    thinking_source: str
    budget: int | None = None
    wanted_budget: int | None = None
    rule: str | None = None
    score: Score | None = None
    better: str | None = None
    better_is_small: bool = False
    fallback: str | None = None
    judged: bool | None = None
    undecided: bool = False
    warnings: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """What a decision depends on besides body and policy.

    `tokens`: the prompt's exact size where it was counted; `now_s`: on the clock of `past`.
    """

    view: View
    past: Past | None = None
    score: Score | None = None
    tokens: int | None = None
    now_s: float = 0.0


def as_json(decision: Decision) -> dict[str, Any]:
    """The decision as `POST /v1/router/preview` answers it."""
    return {
        "model": decision.model_id,
        "thinking": decision.thinking,
        "budget": decision.budget,
        "sources": {"model": decision.model_source, "thinking": decision.thinking_source},
        "rule": decision.rule,
        "score": round(decision.score.think, 4) if decision.score else None,
        "size_score": round(decision.score.large, 4) if decision.score else None,
        "scorer": decision.score.kind if decision.score else None,
        "better_model": decision.better,
        "fallback": decision.fallback,
        "warnings": list(decision.warnings),
        "steps": [dataclasses.asdict(step) for step in decision.steps],
    }
