"""The effects around a decision: conversation memory, exact token counts, the scorer, and the clock."""

from __future__ import annotations

import copy
import dataclasses
import re
import time
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers

from serve_app.errors import ApiError
from serve_app.model_schema import Model
from serve_app.router.auth import digest_of, given_key
from serve_app.router.memory import Memory
from serve_app.router.tokens import TokenCounter
from serve_app.routing.decide import decide
from serve_app.routing.decision import Decision, Setting
from serve_app.routing.excerpt import Excerpt
from serve_app.routing.facts import Endpoint, Facts, prompts_of, read_facts, size_of
from serve_app.routing.model_choice import unsure_of_fit
from serve_app.routing.policy import Policy, View, plain_policy, policy_for
from serve_app.routing.sticky import Past, conversation_key, previous_turn_id, turn_id
from serve_app.routing_schema import SECRET_HEADERS
from serve_app.scoring.guard import Guarded
from serve_app.telemetry.shadow import ShadowRecord

# One for each key's models, and for each set of those that are awake while another is overloaded.
_MAX_POLICIES = 256
_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*\"?(\d{1,6})")


@dataclasses.dataclass(frozen=True, slots=True)
class Decided:
    """A request with its decision.

    `wait_s`: the patience that the client stated (`Prefer: wait=N`), if any; `seconds`: what deciding took;
    `conversation`: its key in the memory, and whether the client named it; `shadowed`: what shadow mode decided.
    """

    facts: Facts
    decision: Decision
    wait_s: float | None
    seconds: float
    conversation: str | None = None
    is_named: bool = False
    shadowed: Decision | None = None

    @property
    def cold(self) -> str | None:
        """A model that is worth waiting for. (A smaller one is there to be quick; nobody waits for it.)"""
        return None if self.decision.better_is_small else self.decision.better


class Decider:
    """Decides requests. `view` states how soon each model would answer; it is read at each decision."""

    def __init__(self, policy: Policy, view: View, scorer: Guarded | None, counter: TokenCounter) -> None:
        self._policy = policy
        self._view = view
        self._scorer = scorer
        self._counter = counter
        self._memory = Memory(policy.settings.sticky)
        shadow = policy.settings.shadow
        self._shadows = shadow.enabled
        self._policies: dict[frozenset[str], Policy] = {}
        self._record = ShadowRecord(shadow.file) if shadow.enabled else None

    def with_policy(self, policy: Policy, view: View) -> Decider:
        """One that decides by another policy, with the same memory, scorer and shadow record."""
        other = copy.copy(self)
        other._policy, other._view, other._policies = policy, view, {}
        return other

    @property
    def warms(self) -> bool:
        """Whether a better but cold model is to be loaded in the background."""
        return self._policy.settings.warm and not self._shadows

    async def start(self) -> None:
        """Begin to start the scorer; until it is ready the lexical score decides."""
        if self._scorer:
            await self._scorer.start()

    async def close(self) -> None:
        """Stop the scorer, and write what is not yet written."""
        if self._record:
            await self._record.flush()
        if self._scorer:
            await self._scorer.close()

    async def decide(
        self, parsed: object, endpoint: Endpoint, headers: Headers, models: frozenset[str] | None = None
    ) -> Decided:
        """Read a parsed body and decide it. Raises `ApiError`. `models`: those that may answer; None: all."""
        began = time.perf_counter()
        policy = self._policy_for(models)
        who = _fingerprint(headers)
        facts = read_facts(parsed, endpoint, _reader(headers), who)
        wait_s = preferred_wait(headers)
        excerpt = facts.excerpt
        if excerpt is None:
            decision = decide(facts, policy, Setting(self._view))
            return Decided(facts, decision, wait_s, time.perf_counter() - began)
        key = None
        past = None
        named = "x-session-id" in headers or "conversation" in facts.body
        if self._policy.settings.sticky.enabled:
            key = conversation_key(facts.chat, headers.get("x-session-id"), who)
            past = self._past(key, excerpt)
        tokens = None
        if unsure := unsure_of_fit(facts, policy, excerpt.prompt_tokens):
            tokens = await self._counter.count(unsure[0], facts.chat)
        setting = Setting(self._view, past, tokens=tokens, now_s=time.monotonic())
        decision = decide(facts, policy, setting)
        if decision.undecided and self._scorer:
            score = await self._scorer.score(excerpt, facts.chat)
            if score:
                decision = decide(facts, policy, dataclasses.replace(setting, score=score))
        if not self._shadows:
            return Decided(facts, decision, wait_s, time.perf_counter() - began, key, named)
        applied = decide(facts, plain_policy(policy), Setting(self._view, tokens=tokens))
        return Decided(facts, applied, wait_s, time.perf_counter() - began, key, named, shadowed=decision)

    def _policy_for(self, models: frozenset[str] | None) -> Policy:
        if models is None:
            return self._policy
        if models not in self._policies:
            if len(self._policies) >= _MAX_POLICIES:
                self._policies.clear()
            self._policies[models] = policy_for(self._policy, models)
        found = self._policies[models]
        if not found.catalog.models:
            raise ApiError(403, "This key may use no model that there is here.", code="model_not_allowed")
        return found

    def _past(self, key: str, excerpt: Excerpt) -> Past | None:
        """What the conversation's request before this one was given: in the same turn, or in the one before.

        Other requests under the same key (a second agent, a title for the chat) are in turns of their own.
        """
        if excerpt.in_tool_loop and (past := self._memory.recall(key + turn_id(excerpt))):
            return past
        previous = previous_turn_id(excerpt)
        # Where history was shortened on the way, the last request of a conversation that has a name will do.
        return (previous and self._memory.recall(key + previous)) or self._memory.recall(key)

    async def tokens(self, decided: Decided, model: Model, body: dict[str, Any]) -> tuple[int, bool]:
        """The size of the prompt that an engine gets in this body, the longest of several, and whether it is exact.

        It is where the model's tokenizer is at hand; else it is the estimate.
        """
        facts = decided.facts
        if facts.excerpt is not None:
            chat = body if facts.endpoint == "chat" else {**facts.chat, **_template_arguments(body)}
            counted = await self._counter.count(model, chat)
            return (facts.excerpt.prompt_tokens, False) if counted is None else (counted, True)
        prompts = prompts_of(facts)
        texts = [prompt for prompt in prompts if not isinstance(prompt, list)]
        given = max((len(prompt) for prompt in prompts if isinstance(prompt, list)), default=0)
        special = facts.body.get("add_special_tokens") is not False
        counted = await self._counter.longest(model, texts, special=special) if texts else 0
        if counted is None:
            return max(given, *map(size_of, texts)), False
        return max(given, counted), True

    def remember(self, decided: Decided) -> None:
        """Keep the decision: for the conversation's next request, and on the shadow record. Not called for previews."""
        if self._record and decided.shadowed:
            self._record.record(decided.decision, decided.shadowed, decided.facts)
        excerpt = decided.facts.excerpt
        if decided.conversation is None or excerpt is None:
            return
        decision = decided.shadowed or decided.decision
        turn = turn_id(excerpt)
        past = Past(
            turn=turn,
            model_id=decision.model_id,
            thinking=decision.thinking,
            budget=decision.wanted_budget,
            judged=decision.judged,
            by_router=decision.model_source not in ("explicit", "alias"),
            tokens=excerpt.prompt_tokens,
            at_s=time.monotonic(),
        )
        self._memory.remember(decided.conversation + turn, past)
        if decided.is_named:
            self._memory.remember(decided.conversation, past)


def _template_arguments(body: dict[str, Any]) -> dict[str, Any]:
    return {"chat_template_kwargs": body["chat_template_kwargs"]} if "chat_template_kwargs" in body else {}


def preferred_wait(headers: Headers) -> float | None:
    """Seconds of `Prefer: wait=N` (RFC 7240)."""
    found = _WAIT.search(", ".join(headers.getlist("prefer")).lower())
    return float(found[1]) if found else None


def _fingerprint(headers: Headers) -> str:
    """First 12 hex digits of the API key's SHA-256, as rules name keys; empty without one."""
    key = given_key(headers)
    return digest_of(key)[:12] if key else ""


def _reader(headers: Headers) -> Callable[[str], str | None]:
    def read(name: str) -> str | None:
        return None if name.lower() in SECRET_HEADERS else headers.get(name)

    return read
