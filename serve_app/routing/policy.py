"""Everything that a decision is made from, besides the request: catalog, rules, settings, state of the models. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from serve_app.catalog import Catalog, allowing
from serve_app.routing.lexical import shipped_lexicon
from serve_app.routing.rules import Rules, shipped_rules, tasks_of
from serve_app.routing_schema import RoutingSettings


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """A configuration, ready to decide."""

    catalog: Catalog
    settings: RoutingSettings
    rules: Rules
    smallest_context: int


def policy_of(catalog: Catalog, settings: RoutingSettings) -> Policy:
    """Compile the rules, and read the tables that ship: the first request must not."""
    tasks_of("")
    shipped_lexicon()
    shipped = shipped_rules() if settings.shipped_rules else ()
    contexts = [model.context for model in catalog.models.values() if "chat" in model.abilities]
    return Policy(catalog, settings, Rules([*settings.rules, *shipped]), min(contexts, default=0))


def policy_for(policy: Policy, ids: Collection[str]) -> Policy:
    """The same policy where only these models may answer."""
    catalog = allowing(policy.catalog, ids)
    contexts = [model.context for model in catalog.models.values() if "chat" in model.abilities]
    return dataclasses.replace(policy, catalog=catalog, smallest_context=min(contexts, default=0))


def plain_policy(policy: Policy) -> Policy:
    """The same without any judgement of the router's: what is applied in shadow mode."""
    settings = policy.settings.model_copy(update={"thinking": "default", "small_model": None, "rules": []})
    return dataclasses.replace(policy, settings=settings, rules=Rules([]))


@dataclasses.dataclass(frozen=True, slots=True)
class ModelState:
    """How soon a model would answer: `awake`, or after about `wake_s` seconds."""

    awake: bool
    wake_s: float = 0.0


View = Mapping[str, ModelState]
