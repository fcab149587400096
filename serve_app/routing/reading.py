"""One request as the stages of a decision see it: what several of them ask for, read once, and the steps they leave.

Pure: only what it reads from the request is kept.
"""

from __future__ import annotations

from serve_app.model_schema import Model
from serve_app.routing.decision import Setting, Step
from serve_app.routing.excerpt import Excerpt
from serve_app.routing.facts import Facts
from serve_app.routing.lexical import Score, shipped_lexicon
from serve_app.routing.policy import Policy
from serve_app.routing.rules import Request, tasks_of
from serve_app.routing.sticky import Past, turn_id
from serve_app.routing_schema import Rule

# An estimate of the prompt's tokens may be wrong by this factor, either way.
ESTIMATE_ERROR = 1.5
# A follow-up that names nothing of its own.
_FOLLOW_UP_TOKENS = 12


class Reading:
    """Facts, policy and setting, with excerpt, rules and score read when first asked for."""

    def __init__(self, facts: Facts, policy: Policy, setting: Setting) -> None:
        self.facts = facts
        self.catalog = policy.catalog
        self.settings = policy.settings
        self.setting = setting
        self.steps: list[Step] = []
        self.score: Score | None = None
        self._policy = policy
        self._excerpt = facts.excerpt
        self._rules: tuple[Rule | None, Rule | None] | None = None

    def say(self, step: str, about: str, verdict: str) -> None:
        """Leave a step."""
        self.steps.append(Step(step, about, verdict))

    @property
    def excerpt(self) -> Excerpt:
        """What the last turn asks."""
        assert self._excerpt, "only chats have an excerpt"
        return self._excerpt

    @property
    def past(self) -> Past | None:
        """The conversation's last decision, where conversations are remembered."""
        return self.setting.past if self.settings.sticky.enabled else None

    @property
    def tokens(self) -> int:
        """Tokens of the prompt: counted, or else estimated."""
        return self.setting.tokens or self.excerpt.prompt_tokens

    def rules(self) -> tuple[Rule | None, Rule | None]:
        """The rules that decide about thinking and about the model."""
        if self._rules is None:
            request = Request(
                excerpt=self.excerpt,
                tasks=tasks_of(self.excerpt.instruction),
                model=self.facts.model,
                json_schema=self.facts.json_schema,
                header=self.facts.header,
                key=self.facts.key,
            )
            self._rules = self._policy.rules.decisive(request)
        return self._rules

    def scored(self) -> Score:
        """The scorer's judgement, or the lexical one where it gave none."""
        if self.score is None:
            self.score = self.setting.score or shipped_lexicon().score(self.excerpt)
        return self.score

    def is_awake(self, model: Model) -> bool:
        """Whether the model would answer at once."""
        state = self.setting.view.get(model.id)
        return model.tier == "resident" if state is None else state.awake

    def same_turn(self, past: Past) -> bool:
        """Inside a tool loop: the same user turn as the conversation's last request, and tools in between."""
        return self.excerpt.in_tool_loop and past.turn == turn_id(self.excerpt)

    def follows_up(self) -> bool:
        """Whether the last turn only says "go ahead"."""
        excerpt = self.excerpt
        return (
            excerpt.turns > 1 and excerpt.ask_tokens <= _FOLLOW_UP_TOKENS and "affirm" in tasks_of(excerpt.instruction)
        )
