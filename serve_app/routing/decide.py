"""The decision: which model answers, and whether it thinks, each with its source. Pure.

Order of both choices: hard constraints, what the client said, what the conversation keeps, rules, scorer, default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from serve_app.catalog import AUTO
from serve_app.config import Model
from serve_app.errors import ApiError, bad_request, model_not_found
from serve_app.routing.excerpt import Excerpt, read_excerpt
from serve_app.routing.facts import Facts
from serve_app.routing.lexical import Score, shipped_lexicon
from serve_app.routing.policy import Policy, View
from serve_app.routing.rules import Request, tasks_of
from serve_app.routing.sticky import Past, switch_cost_s, turn_id
from serve_app.routing.thinking import Wish, wishes
from serve_app.routing_schema import Rule

_PROFILES = {"think": True, "fast": False}
# Of the tokens that an answer may have this share stays free of thinking.
_ANSWER_SHARE = 0.25
# An estimate of the prompt's tokens may be wrong by this factor, either way.
ESTIMATE_ERROR = 1.5
# Where nothing but the default speaks for a switch back to it, it waits until the conversation's cache is small.
_GAIN_OF_DEFAULT = 0.1
# A follow-up that names nothing of its own.
_FOLLOW_UP_TOKENS = 12


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One stage of the decision: what it was asked for (`model` or `thinking`), and what it said."""

    step: str
    about: str
    verdict: str


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """Which model answers and whether it thinks. `budget`: thinking tokens, None for no limit.

    `better`: the model that would have answered, were it awake; the caller loads it. `fallback` says so in words.
    `judged`: what rules or scorer thought, for the conversation's memory. `undecided`: a scorer may be asked, and
    the decision made again with its score. `warnings` are for the client: what could not be followed.
    """

    model_id: str
    model_source: str
    thinking: bool
    thinking_source: str
    budget: int | None = None
    rule: str | None = None
    score: Score | None = None
    better: str | None = None
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


def decide(facts: Facts, policy: Policy, setting: Setting) -> Decision:
    """Decide one request. Raises `ApiError` for what no model can do; the client's own choice always wins."""
    return _Deciding(facts, policy, setting).decide()


class _Deciding:
    """The stages of one decision, and the steps they leave."""

    def __init__(self, facts: Facts, policy: Policy, setting: Setting) -> None:
        self._facts = facts
        self._policy = policy
        self._catalog = policy.catalog
        self._settings = policy.settings
        self._setting = setting
        self._steps: list[Step] = []
        self._excerpt: Excerpt | None = facts.excerpt
        self._thinking_rule: Rule | None = None
        self._model_rule: Rule | None = None
        self._score: Score | None = None
        self._asked_scorer = False
        self._rules_read = False

    def decide(self) -> Decision:
        named, source, profile = self._named_model()
        if self._facts.endpoint != "chat":
            model = named or self._able_default()
            _check_fit(self._facts, model, self._setting.tokens)
            # Raw text has no template, and so no switch.
            return Decision(model.id, source, False, self._facts.endpoint, steps=tuple(self._steps))
        better: Model | None = None
        fallback: str | None = None
        if named is None:
            model, source, better, fallback = self._choose_model()
        else:
            model = named
        _check_fit(self._facts, model, self._setting.tokens)
        said = wishes(self._facts, model.thinking)
        if profile:
            said.append(profile)
        thinking, thinking_source, budget, warnings = self._choose_thinking(model, said)
        rule = self._thinking_rule if thinking_source == "rule" else None
        rule = rule or (self._model_rule if source == "rule" else None)
        return Decision(
            model_id=model.id,
            model_source=source,
            thinking=thinking,
            thinking_source=thinking_source,
            budget=budget,
            rule=rule.name if rule else None,
            score=self._score,
            better=better.id if better else None,
            fallback=fallback,
            judged=self._judged(thinking_source),
            undecided=self._asked_scorer and self._setting.score is None,
            warnings=warnings,
            steps=tuple(self._steps),
        )

    def _say(self, step: str, about: str, verdict: str) -> None:
        self._steps.append(Step(step, about, verdict))

    # The model

    def _named_model(self) -> tuple[Model | None, str, Wish | None]:
        name = self._facts.model
        if name is None or name == AUTO:
            return None, "default", None
        if model := self._catalog.find(name):
            return self._explicit(model, name, None)
        # Profiles come last, so that ids which themselves hold a colon keep working.
        base, _, suffix = name.rpartition(":")
        if suffix in _PROFILES:
            profile = Wish(_PROFILES[suffix], "profile")
            if base == AUTO:
                return None, "default", profile
            if model := self._catalog.find(base):
                return self._explicit(model, base, profile)
        raise model_not_found()

    def _explicit(self, model: Model, name: str, profile: Wish | None) -> tuple[Model, str, Wish | None]:
        source = "explicit" if model.id == name else "alias"
        self._say("explicit", "model", f"{model.id}, by {'its id' if source == 'explicit' else 'an alias'}")
        return model, source, profile

    def _able_default(self) -> Model:
        """For what has no excerpt: the default model, or the first that can."""
        default = self._catalog.models[self._catalog.default_id]
        if self._facts.endpoint in default.abilities:
            return default
        return next(
            (model for model in self._catalog.models.values() if self._facts.endpoint in model.abilities), default
        )

    def _choose_model(self) -> tuple[Model, str, Model | None, str | None]:
        """The model for `auto`, its source, and the better one that is cold."""
        able = self._able_models()
        configured = self._catalog.models[self._catalog.default_id]
        default, source = configured, "default"
        if configured not in able:
            awake = [model for model in able if self._awake(model)]
            default = min(awake or able, key=lambda model: (model.tier != "resident", model.context))
            source = "constraint"
            self._say("constraint", "model", f"{default.id}; {configured.id} lacks the abilities or the context")
        past = self._past()
        kept = next((model for model in able if past and model.id == past.model_id), None)
        if past and kept and (why := self._must_keep(past)):
            self._say("sticky", "model", f"{kept.id}: {why}")
            return kept, "sticky", None, None
        if past and not past.by_router:
            kept = None  # the client named it then; now it leaves the choice to us
        wanted, wanted_source, gain = self._wanted_model(default, able)
        if past and kept and kept.id != wanted.id and self._awake(kept):
            cost = self._switch_cost(past, wanted)
            if gain * self._settings.sticky.gain_s <= cost:
                self._say("sticky", "model", f"{kept.id} kept; {wanted.id} is not worth {cost:.1f} s")
                return kept, "sticky", None, None
        if wanted_source == "default":
            wanted_source = source
            self._say("default", "model", wanted.id)
        substitute = kept if kept and self._awake(kept) else default
        if wanted.id == substitute.id or self._awake(wanted) or not self._awake(substitute):
            return wanted, wanted_source, None, None
        fallback = f"{wanted.id} is not awake; {substitute.id} answers"
        self._say("fallback", "model", fallback)
        return substitute, "fallback", wanted, fallback

    def _able_models(self) -> list[Model]:
        """The models that can do what is asked, and whose context the prompt may fit. Never empty."""
        excerpt = self._read()
        hard = ["chat", "vision"] if excerpt.images else ["chat"]
        soft = []
        if excerpt.tools and self._facts.body.get("tool_choice") != "none":
            soft.append("tools")
        if self._facts.json_schema:
            soft.append("json")
        # What no model is said to do, the best engine says what it does with; images would be a fault there.
        for needs in ([*hard, *soft], [*hard, *soft[:1]], [*hard, *soft[1:]], hard):
            if able := [model for model in self._catalog.models.values() if set(needs) <= set(model.abilities)]:
                break
        else:
            if excerpt.images:
                raise bad_request("No model here takes images.", "messages", "unsupported_content")
            return [self._catalog.models[self._catalog.default_id]]
        if fitting := [model for model in able if self._fits(model)]:
            return fitting
        largest = max(able, key=lambda model: model.context)
        if self._setting.tokens or self._tokens() / ESTIMATE_ERROR > largest.context:
            raise _too_long(largest, self._tokens(), self._facts.max_tokens or 0)
        return [largest]  # its engine counts exactly

    def _tokens(self) -> int:
        return self._setting.tokens or self._read().prompt_tokens

    def _fits(self, model: Model) -> bool:
        return self._tokens() <= model.context - (self._facts.max_tokens or 1)

    def _past(self) -> Past | None:
        return self._setting.past if self._settings.sticky.enabled else None

    def _must_keep(self, past: Past) -> str | None:
        """Why no other model may be chosen now, even if it is not awake; None where one may."""
        if self._same_turn(past):
            return "same turn"
        if past.by_router and self._follows_up():
            return "a follow-up"
        return None

    def _switch_cost(self, past: Past, wanted: Model) -> float:
        state = self._setting.view.get(wanted.id)
        load_s = 0.0 if state is None or state.awake else state.wake_s
        return switch_cost_s(past, self._settings.sticky, now_s=self._setting.now_s, load_s=load_s)

    def _wanted_model(self, default: Model, able: Sequence[Model]) -> tuple[Model, str, float]:
        """What rules and scorer would have answer, who said so, and how much better it is (0 to 1) than another."""
        small = next((model for model in able if model.id == self._settings.small_model), None)
        self._read_rules()
        rule = self._model_rule
        if rule and (rule.then.model or small):
            name = rule.then.model
            wanted = next((model for model in able if model.id == name), None) if name else None
            if name is None:
                wanted = small if rule.then.size == "small" else default
            if wanted:
                self._say("rule", "model", f"{rule.name}: {wanted.id}")
                return wanted, "rule", 1.0
            self._say("rule", "model", f"{rule.name}: {name} cannot answer this")
        else:
            self._say("rule", "model", "none")
        if small is None:
            return default, "default", _GAIN_OF_DEFAULT
        score = self._scored()
        small_below = self._settings.scorer.small_below or score.small_below
        is_small = score.large < small_below
        self._say("scorer", "model", f"{'small' if is_small else 'large'}: {score.large:.2f} ({score.kind})")
        return (small if is_small else default), "scorer", min(1.0, 2 * abs(score.large - small_below))

    def _awake(self, model: Model) -> bool:
        state = self._setting.view.get(model.id)
        return model.tier == "resident" if state is None else state.awake

    # Thinking

    def _choose_thinking(self, model: Model, said: list[Wish]) -> tuple[bool, str, int | None, tuple[str, ...]]:
        if not model.thinking.supported:
            asked = next((wish for wish in said if wish.thinking), None)
            warning = f"{model.id} cannot think; {asked.source} was not followed" if asked else ""
            self._say("constraint", "thinking", f"off: {model.id} cannot think")
            return False, "unsupported", None, (warning,) if asked else ()
        if said:
            winner = said[0]
            warnings = tuple(
                f"{winner.source} overrides {wish.source}" for wish in said[1:] if wish.thinking != winner.thinking
            )
            self._say("explicit", "thinking", f"{_on(winner.thinking)}: {winner.source}")
            return winner.thinking, winner.source, self._client_budget(model, said), warnings
        self._say("explicit", "thinking", "nothing said")
        thinking, source = self._policy_thinking(model)
        return thinking, source, self._own_budget(model, source) if thinking else None, ()

    def _policy_thinking(self, model: Model) -> tuple[bool, str]:
        """What the router itself decides."""
        if self._settings.thinking == "default":
            self._say("default", "thinking", f"{_on(model.thinking.default)}: {model.id}'s")
            return model.thinking.default, "default"
        excerpt = self._read()
        past = self._past()
        if past and self._same_turn(past):
            self._say("sticky", "thinking", f"{_on(past.thinking)}: same turn")
            return past.thinking, "sticky"
        room = self._facts.max_tokens
        if excerpt.prefilled or (room is not None and room < self._settings.min_answer_tokens):
            why = "the answer is begun" if excerpt.prefilled else f"{room} tokens are too few"
            self._say("constraint", "thinking", f"off: {why}")
            return False, "constraint"
        if past and past.judged is not None and self._follows_up():
            self._say("sticky", "thinking", f"{_on(past.judged)}: a follow-up, as what it follows")
            return past.judged, "sticky"
        self._say("sticky", "thinking", "a turn of its own" if past else "a new conversation")
        self._read_rules()
        if (rule := self._thinking_rule) and rule.then.thinking is not None:
            self._say("rule", "thinking", f"{_on(rule.then.thinking)}: {rule.name}")
            return rule.then.thinking, "rule"
        self._say("rule", "thinking", "none")
        score = self._scored()
        threshold = self._settings.scorer.think_at or score.think_at
        if abs(score.think - threshold) < self._settings.scorer.abstain:
            self._say("scorer", "thinking", f"abstains: {score.think:.2f} ({score.kind})")
            self._say("default", "thinking", f"{_on(model.thinking.default)}: {model.id}'s")
            return model.thinking.default, "default"
        thinking = score.think >= threshold
        self._say("scorer", "thinking", f"{_on(thinking)}: {score.think:.2f} from {threshold:.2f} ({score.kind})")
        return thinking, "scorer"

    def _same_turn(self, past: Past) -> bool:
        """Inside a tool loop: the same user turn as the conversation's last request, and tools in between."""
        excerpt = self._read()
        return excerpt.in_tool_loop and past.turn == turn_id(excerpt)

    def _follows_up(self) -> bool:
        excerpt = self._read()
        return (
            excerpt.turns > 1 and excerpt.ask_tokens <= _FOLLOW_UP_TOKENS and "affirm" in tasks_of(excerpt.instruction)
        )

    def _judged(self, source: str) -> bool | None:
        """The difficulty of this turn, for follow-ups to inherit; None where the client decided."""
        past = self._past()
        if source == "sticky":
            return past.judged if past else None
        if source == "rule" and self._thinking_rule:
            return self._thinking_rule.then.thinking
        if source in ("scorer", "default") and self._score:
            return self._score.think >= (self._settings.scorer.think_at or self._score.think_at)
        return None

    def _client_budget(self, model: Model, said: list[Wish]) -> int | None:
        """The strongest budget that agrees with the winner, cut so that the answer keeps its share."""
        if not said[0].thinking:
            return None
        wish = next((wish for wish in said if wish.thinking and (wish.budget or wish.unlimited)), None)
        return self._clamped(model, wish.budget) if wish and wish.budget is not None else None

    def _own_budget(self, model: Model, source: str) -> int | None:
        """Where the client did not ask for it, thinking must not eat the answer that it did ask for."""
        rule = self._thinking_rule
        wanted = rule.then.budget if rule and source == "rule" else None
        past = self._setting.past
        if source == "sticky" and past and past.budget:
            wanted = past.budget
        wanted = wanted or self._settings.thinking_budget
        if wanted is None and self._facts.max_tokens is None:
            return None
        return self._clamped(model, wanted if wanted is not None else model.context)

    def _clamped(self, model: Model, budget: int) -> int:
        """At most what leaves the answer its share of `max_tokens`, or else of what the context has left."""
        room = self._facts.max_tokens
        if room is None:
            room = max(1, model.context - self._tokens())
        return max(1, min(budget, int(room * (1 - _ANSWER_SHARE))))

    # What several stages ask for, read once

    def _read(self) -> Excerpt:
        if self._excerpt is None:
            self._excerpt = read_excerpt(self._facts.body["messages"], self._facts.body.get("tools") or ())
        return self._excerpt

    def _read_rules(self) -> None:
        if self._rules_read:
            return
        self._rules_read = True
        excerpt = self._read()
        request = Request(
            excerpt=excerpt,
            tasks=tasks_of(excerpt.instruction),
            model=self._facts.model,
            json_schema=self._facts.json_schema,
            header=self._facts.header,
            key=self._facts.key,
        )
        self._thinking_rule, self._model_rule = self._policy.rules.decisive(request)

    def _scored(self) -> Score:
        self._asked_scorer = True
        if self._score is None:
            self._score = self._setting.score or shipped_lexicon().score(self._read())
        return self._score


def _on(thinking: bool) -> str:
    return "on" if thinking else "off"


def _check_fit(facts: Facts, model: Model, tokens: int | None) -> None:
    if facts.endpoint not in model.abilities:
        raise bad_request(f"{model.id} does not do {facts.endpoint}.", "model", "unsupported_model")
    if facts.has_images and "vision" not in model.abilities:
        raise bad_request(f"{model.id} does not take images.", "messages", "unsupported_content")
    if facts.max_tokens is not None and facts.max_tokens >= model.context:
        raise ApiError(
            400,
            f"{model.id} has a context of {model.context} tokens; {facts.max_tokens} for the answer leave"
            " no room for the prompt.",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if tokens is not None and tokens + (facts.max_tokens or 1) > model.context:
        raise _too_long(model, tokens, facts.max_tokens or 0)


def _too_long(model: Model, tokens: int, max_tokens: int) -> ApiError:
    answer = f" and {max_tokens} for the answer" if max_tokens else ""
    return ApiError(
        400,
        f"The prompt has about {tokens} tokens{answer}; {model.id} has a context of {model.context}.",
        param="messages",
        code="context_length_exceeded",
    )


def unsure_of_fit(facts: Facts, policy: Policy, prompt_tokens: int) -> list[Model]:
    """The models into whose context the estimated prompt may or may not fit: worth counting exactly."""
    need = facts.max_tokens or 1
    if prompt_tokens * ESTIMATE_ERROR + need <= policy.smallest_context:
        return []
    name = facts.model
    models = policy.catalog.models.values()
    if name is not None and name != AUTO and not name.startswith(AUTO + ":"):
        return []  # its own engine counts, and says so
    return [
        model
        for model in models
        if "chat" in model.abilities
        and prompt_tokens / ESTIMATE_ERROR <= model.context - need < prompt_tokens * ESTIMATE_ERROR
    ]


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
