"""Which model answers: the one that the client named, or for `auto` the choice of the router. Pure.

In this order: hard constraints, what the conversation keeps, rules, scorer, default; and no model that is not awake
while another can answer.
"""

from __future__ import annotations

import dataclasses
import itertools

from serve_app.catalog import AUTO
from serve_app.errors import ApiError, bad_request, model_not_found
from serve_app.model_schema import PROFILES, Model
from serve_app.routing.facts import Facts
from serve_app.routing.media import foreign_media
from serve_app.routing.policy import Policy
from serve_app.routing.reading import ESTIMATE_ERROR, Reading
from serve_app.routing.sticky import Past, switch_cost_s
from serve_app.routing.thinking import Wish

_THINKING = "thinking"
# Alternatives for each token. To vLLM -1 is the whole vocabulary, where its own limit was lifted.
_ALTERNATIVES = ("logprobs", "top_logprobs", "prompt_logprobs")
# Where nothing but the default speaks for a switch back to it, it waits until the conversation's cache is small.
_GAIN_OF_DEFAULT = 0.1


def named_model(reading: Reading) -> tuple[Model | None, str, Wish | None]:
    """The model that the client named, and the profile in its name. Raises `ApiError` for one that is not there."""
    name = reading.facts.model
    if name is None or name == AUTO:
        return None, "default", None
    if model := reading.catalog.find(name):
        return _explicit(reading, model, name, None)
    # Profiles come last, so that ids which themselves hold a colon keep working.
    base, _, suffix = name.rpartition(":")
    if suffix in PROFILES:
        profile = Wish(PROFILES[suffix], "profile")
        if base == AUTO:
            return None, "default", profile
        if model := reading.catalog.find(base):
            return _explicit(reading, model, base, profile)
    raise model_not_found()


def _explicit(reading: Reading, model: Model, name: str, profile: Wish | None) -> tuple[Model, str, Wish | None]:
    source = "explicit" if model.id == name else "alias"
    reading.say("explicit", "model", f"{model.id}, by {'its id' if source == 'explicit' else 'an alias'}")
    return model, source, profile


def able_default(reading: Reading) -> Model:
    """For what has no excerpt: the default model, or the first that can."""
    default = reading.catalog.models[reading.catalog.default_id]
    ability = reading.facts.ability
    if ability is None or ability in default.abilities:
        return default
    return next((model for model in reading.catalog.models.values() if ability in model.abilities), default)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelChoice:
    """The model for `auto` and who chose it. `better`: one that is cold; `fallback` says so in words."""

    model: Model
    source: str
    better: Model | None = None
    fallback: str | None = None


def choose_model(reading: Reading, *, must_think: bool) -> ModelChoice:
    """Choose the model for `auto`. Raises `ApiError` where no model can do what is asked.

    `must_think`: the client said so; a model that cannot is then no choice, where one can.
    """
    configured = reading.catalog.models[reading.catalog.default_id]
    default, needs = _able_model(reading, configured, must_think)
    source = "default"
    if default is not configured:
        source = "constraint"
        reading.say("constraint", "model", f"{default.id}; {configured.id} lacks the abilities or the context")
    past = reading.past
    kept = reading.catalog.models.get(past.model_id) if past else None
    if kept and not _suits(reading, kept, needs):
        kept = None
    if past and kept and reading.same_turn(past):
        # Even if it is not awake: half a tool loop by one model and half by another is worse than a wait.
        reading.say("sticky", "model", f"{kept.id}: same turn")
        return ModelChoice(kept, "sticky")
    if past and not past.by_router:
        kept = None  # the client named it then; now it leaves the choice to us
    if kept and reading.follows_up():
        reading.say("sticky", "model", f"{kept.id}: a follow-up")
        wanted, wanted_source, gain = kept, "sticky", 1.0
    else:
        wanted, wanted_source, gain = _wanted_model(reading, default, needs)
    if past and kept and kept.id != wanted.id and reading.is_awake(kept):
        cost = _switch_cost(reading, past, wanted)
        if gain * reading.settings.sticky.gain_s <= cost:
            reading.say("sticky", "model", f"{kept.id} kept; {wanted.id} is not worth {cost:.1f} s")
            return ModelChoice(kept, "sticky")
    if wanted_source == "default":
        wanted_source = source
        reading.say("default", "model", wanted.id)
    substitute = kept if kept and reading.is_awake(kept) else default
    if wanted.id == substitute.id or reading.is_awake(wanted) or not reading.is_awake(substitute):
        return ModelChoice(wanted, wanted_source)
    fallback = f"{wanted.id} is not awake; {substitute.id} answers"
    reading.say("fallback", "model", fallback)
    return ModelChoice(substitute, "fallback", better=wanted, fallback=fallback)


def _able_model(reading: Reading, configured: Model, must_think: bool) -> tuple[Model, frozenset[str]]:
    """The default model, or another where it lacks an ability or the context; and what models must be able to do."""
    hard = frozenset({"chat", "vision"} if reading.excerpt.images else {"chat"})
    soft = []
    if reading.excerpt.tools and reading.facts.body.get("tool_choice") != "none":
        soft.append("tools")
    if must_think:
        soft.append(_THINKING)
    if reading.facts.json_schema:
        soft.append("json")
    needs = hard.union(soft)
    if _suits(reading, configured, needs):
        return configured, needs
    # What no model is said to do, the best engine says what it does with; images would be a fault there.
    fewer = (chosen for size in range(len(soft), -1, -1) for chosen in itertools.combinations(soft, size))
    for needs in map(hard.union, fewer):
        if able := [model for model in reading.catalog.models.values() if _can(model, needs)]:
            break
    else:
        if reading.excerpt.images:
            raise bad_request("No model here takes images.", "messages", "unsupported_content")
        return configured, hard
    fitting = [model for model in able if _fits(reading, model)]
    if not fitting:
        largest = max(able, key=lambda model: model.context)
        if reading.setting.tokens or reading.tokens / ESTIMATE_ERROR > largest.context:
            raise _too_long(largest, reading.tokens, reading.facts.max_tokens or 0)
        return largest, needs  # its engine counts exactly
    if configured in fitting:
        return configured, needs
    awake = [model for model in fitting if reading.is_awake(model)]
    return min(awake or fitting, key=lambda model: (bool(model.base), model.tier != "resident", model.context)), needs


def _suits(reading: Reading, model: Model, needs: frozenset[str]) -> bool:
    return _can(model, needs) and _fits(reading, model)


def _can(model: Model, needs: frozenset[str]) -> bool:
    return all(need in model.abilities or (need == _THINKING and model.thinking.supported) for need in needs)


def _fits(reading: Reading, model: Model) -> bool:
    return reading.tokens <= model.context - (reading.facts.max_tokens or 1)


def _switch_cost(reading: Reading, past: Past, wanted: Model) -> float:
    state = reading.setting.view.get(wanted.id)
    load_s = 0.0 if state is None or state.awake else state.wake_s
    return switch_cost_s(past, reading.settings.sticky, now_s=reading.setting.now_s, load_s=load_s)


def _wanted_model(reading: Reading, default: Model, needs: frozenset[str]) -> tuple[Model, str, float]:
    """What rules and scorer would have answer, who said so, and how much better it is (0 to 1) than another."""
    small = _suiting(reading, reading.settings.small_model, needs)
    _, rule = reading.rules()
    if rule and (rule.then.model or small):
        wanted = _suiting(reading, rule.then.model, needs)
        if rule.then.model is None:
            wanted = small if rule.then.size == "small" else default
        if wanted:
            reading.say("rule", "model", f"{rule.name}: {wanted.id}")
            return wanted, "rule", 1.0
        # A key that may not use it is not told of it either.
        known = rule.then.model if rule.then.model in reading.catalog.models else "its model"
        reading.say("rule", "model", f"{rule.name}: {known} cannot answer this")
    else:
        reading.say("rule", "model", "none")
    if small is None:
        return default, "default", _GAIN_OF_DEFAULT
    score = reading.scored()
    small_below = reading.settings.scorer.small_below or score.small_below
    is_small = score.large < small_below
    reading.say("scorer", "model", f"{'small' if is_small else 'large'}: {score.large:.2f} ({score.kind})")
    return (small if is_small else default), "scorer", min(1.0, 2 * abs(score.large - small_below))


def _suiting(reading: Reading, model_id: str | None, needs: frozenset[str]) -> Model | None:
    model = reading.catalog.models.get(model_id) if model_id else None
    return model if model and _suits(reading, model, needs) else None


def check_fit(facts: Facts, model: Model, tokens: int | None) -> None:
    """Raise `ApiError` where the model cannot do what is asked, or its context is surely too small."""
    if facts.ability is not None and facts.ability not in model.abilities:
        raise bad_request(f"{model.id} does not do {facts.endpoint}.", "model", "unsupported_model")
    if facts.has_images and "vision" not in model.abilities:
        raise bad_request(f"{model.id} does not take images.", "messages", "unsupported_content")
    # Held to a call (`required`, or a function by name) an engine needs no parser to find it.
    if "tools" not in model.abilities and facts.chat.get("tools") and facts.chat.get("tool_choice") in (None, "auto"):
        raise bad_request(f"{model.id} does not call tools here.", "tools", "unsupported_tools")
    for field in _ALTERNATIVES:
        asked = facts.body.get(field)
        # In a chat `logprobs` is a switch.
        if asked is not None and not isinstance(asked, bool) and asked not in range(model.max_logprobs + 1):
            raise bad_request(f"`{field}` must be a whole number from 0 to {model.max_logprobs}.", field)
    hosts = model.engine.get("allowed_media_domains") or ()
    if place := foreign_media(facts, hosts):
        taken = f"`data:` URLs and {', '.join(hosts)}" if hosts else "`data:` URLs"
        raise bad_request(f"{model.id} takes media from {taken} only.", place, "unsupported_content")
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
