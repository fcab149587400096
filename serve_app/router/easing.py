"""What is given up under load before anybody is refused: thinking first, then the size of what answers `auto`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from serve_app.admission.pressure import shrunk_budget, wants_lighter
from serve_app.model_schema import Model
from serve_app.router.decider import Decided
from serve_app.routing.decision import Decision
from serve_app.service_schema import Degrade

# Who decided that a request thinks, where it was not the client.
_ROUTERS_OWN = frozenset({"rule", "scorer", "sticky", "default"})
# The client named the model, or half of a tool loop is done by it.
_KEPT = frozenset({"explicit", "alias", "sticky", "constraint"})


class Easing:
    """`load`: how loaded a model is, by its id; 1: every place is taken."""

    def __init__(self, settings: Degrade, load: Callable[[Model], float]) -> None:
        self._settings = settings
        self._load = load

    def thinks_less(self, decision: Decision, model: Model) -> tuple[Decision, str]:
        """The decision with what is left of its thinking, and what to tell the client; empty: nothing was changed."""
        if not decision.thinking or decision.thinking_source not in _ROUTERS_OWN:
            return decision, ""
        budget = shrunk_budget(self._load(model), decision.budget, self._settings)
        if budget == decision.budget:
            return decision, ""
        note = f"{model.id} is under load: at most {budget} tokens of thinking"
        return dataclasses.replace(decision, budget=budget), note

    def wants_lighter(self, decided: Decided, model: Model) -> bool:
        """Whether another model should answer this, if one can."""
        free = decided.decision.model_source not in _KEPT and decided.facts.excerpt is not None
        return free and wants_lighter(self._load(model), self._settings)
