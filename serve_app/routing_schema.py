"""How `auto` decides: the schema of `routing:` in the configuration. Plain data; `routing/` gives it its meaning."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import re2
from pydantic import Field, field_validator, model_validator

from serve_app.strict import Strict

Language = Literal["zh", "en", "mixed"]
Size = Literal["small", "large"]
Task = Literal[
    "affirm",
    "algorithm",
    "chat",
    "classify",
    "closing",
    "code",
    "debug",
    "extract",
    "harness",
    "math",
    "plan",
    "proof",
    "puzzle",
    "rewrite",
    "sql",
    "summarize",
    "translate",
    "write",
]
Count = Annotated[int, Field(ge=0)]
# A rule must not read them, and nothing shows them.
SECRET_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization", "x-api-key"})
# RE2 instructions. Its time is linear in the text, but also in what is active of these at a time: a counted repetition
# such as .{0,200} makes thousands, and then 4 kB of hostile text take milliseconds.
MOST_INSTRUCTIONS = 300
MOST_INSTRUCTIONS_OF_ALL = 50_000
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"


def checked_pattern(pattern: str) -> str:
    """The pattern, if RE2 takes it. RE2 runs in time linear to the text; what it lacks could run for ever."""
    options = re2.Options()
    options.log_errors = False
    try:
        size = re2.compile(pattern, options).programsize
    except re2.error as error:
        reason = error.args[0].decode() if isinstance(error.args[0], bytes) else str(error.args[0])
        raise ValueError(
            f"is not a pattern that RE2 takes ({reason}); look-around and back references are not in it"
        ) from None
    if not pattern:
        raise ValueError("is empty; it would match everything")
    if size > MOST_INSTRUCTIONS:
        raise ValueError(
            f"is too large: {size} RE2 instructions, {MOST_INSTRUCTIONS} are allowed; counted repetition"
            " such as .{0,200} and large classes make many"
        )
    return pattern


class Range(Strict):
    """A count between two bounds, both included."""

    min: Count = 0
    max: Count | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max: {self.max} is less than min: {self.min}")
        return self


class When(Strict):
    """Conditions on a request; all that are given must hold. A list holds if one of its entries does."""

    text: list[str] = Field(default_factory=list, description="RE2 patterns, searched in the last user message.")
    not_text: list[str] = Field(default_factory=list, description="None of these may be found there.")
    task: list[Task] = Field(default_factory=list, description="Markers, see routing/tasks.yaml.")
    not_task: list[Task] = Field(default_factory=list)
    language: list[Language] = Field(default_factory=list)
    ask_tokens: Range | None = Field(None, description="Estimated tokens of the last user message.")
    prompt_tokens: Range | None = Field(None, description="Estimated tokens of the whole prompt.")
    turns: Range | None = Field(None, description="User messages in the conversation, this one included.")
    tools: bool | None = None
    tool_loop: bool | None = Field(None, description="The last message is a tool's result.")
    json_schema: bool | None = Field(None, description="The answer is held to a schema, regex, choice or grammar.")
    images: bool | None = None
    system: bool | None = Field(None, description="There is a system prompt.")
    model: list[str] = Field(default_factory=list, description="The name that the client asked for, as it wrote it.")
    header: dict[str, str] = Field(default_factory=dict, description="RE2 pattern by request header.")
    key: list[Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]] = Field(
        default_factory=list, description="First 12 hex digits of the SHA-256 of the client's API key."
    )

    @field_validator("text", "not_text")
    @classmethod
    def _patterns(cls, patterns: list[str]) -> list[str]:
        for index, pattern in enumerate(patterns):
            _check_at(f"[{index}]", pattern)
        return patterns

    @field_validator("header")
    @classmethod
    def _headers(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, pattern in headers.items():
            if name.lower() in SECRET_HEADERS:
                raise ValueError(f"{name}: holds a secret; use `key` with its fingerprint")
            _check_at(f".{name}", pattern)
        return {name.lower(): pattern for name, pattern in headers.items()}

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, given: Any) -> Any:
        """One value may stand where a list is meant."""
        if not isinstance(given, dict):
            return given
        listed = ("text", "not_text", "task", "not_task", "language", "model", "key")
        return {name: [value] if name in listed and isinstance(value, str) else value for name, value in given.items()}

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not any(map(_restricts, self.model_dump().values())):
            raise ValueError("has no condition; it would match every request, use routing.thinking for that")
        return self


def _restricts(condition: Any) -> bool:
    """Whether a condition, as plain data, can fail at all."""
    if isinstance(condition, dict) and condition.keys() == {"min", "max"}:
        return bool(condition["min"]) or condition["max"] is not None
    return condition is not None and condition not in ([], {})


def _patterns_of(when: When) -> list[str]:
    return [*when.text, *when.not_text, *when.header.values()]


def _check_at(where: str, pattern: str) -> None:
    try:
        checked_pattern(pattern)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


class Then(Strict):
    """What a rule decides: whether to think, the model, or both."""

    thinking: bool | None = None
    budget: Annotated[int, Field(ge=1)] | None = Field(None, description="Thinking tokens.")
    model: str | None = Field(None, description="Id of a configured model.")
    size: Size | None = Field(None, description="`small`: routing.small_model; `large`: the default model.")

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if self.thinking is None and self.model is None and self.size is None:
            raise ValueError("decides nothing; give thinking, model or size")
        if self.model is not None and self.size is not None:
            raise ValueError("size: give model or size, not both")
        if self.budget is not None and not self.thinking:
            raise ValueError("budget: needs thinking: true")
        return self


class Rule(Strict):
    """One rule. The first that matches, by priority and then by order, decides what it names."""

    name: Annotated[str, Field(pattern=f"^{_NAME}$")]
    priority: int = Field(0, description="Higher comes first; the shipped rules have -100 to -90.")
    when: When
    then: Then


class Scorer(Strict):
    """Who judges what no rule decided."""

    kind: Literal["lexical", "embedding", "self"] = Field(
        "lexical",
        description="lexical: words and shape, microseconds; embedding: a small trained encoder (extra `scorer`);"
        " self: the resident model itself, one token.",
    )
    think_at: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="Think from this probability on; unset: what the scorer was calibrated to."
    )
    small_below: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="Below this probability of needing the large model the small one answers."
    )
    abstain: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.0, description="Half width of the band around think_at in which the default is applied instead."
    )
    deadline_ms: Annotated[float, Field(gt=0)] | None = Field(
        None, description="After this the lexical score is used. Unset: 40 for embedding, 1500 for self."
    )
    cache_entries: Annotated[int, Field(ge=0)] = 4096
    breaker_failures: Annotated[int, Field(ge=1)] = Field(
        5, description="After so many failures in a row the scorer is left alone for breaker_s."
    )
    breaker_s: Annotated[float, Field(gt=0)] = 10
    threads: Annotated[int, Field(ge=1)] = Field(1, description="Compute threads of the embedding scorer.")

    @property
    def deadline_s(self) -> float:
        """The deadline that holds, seconds."""
        return (self.deadline_ms or {"self": 1500.0}.get(self.kind, 40.0)) / 1000


class Sticky(Strict):
    """What a conversation keeps from turn to turn."""

    enabled: bool = True
    ttl_s: Annotated[float, Field(gt=0)] = Field(3600, description="A conversation is forgotten after this idle time.")
    entries: Annotated[int, Field(ge=1)] = 20_000
    prefill_tokens_per_s: Annotated[float, Field(gt=0)] = Field(
        5000, description="Prefill speed, to price the prefix cache that a switch of model loses."
    )
    cache_half_life_s: Annotated[float, Field(gt=0)] = Field(
        300, description="Idle time after which half of a conversation's prefix cache is thought evicted."
    )
    gain_s: Annotated[float, Field(ge=0)] = Field(
        2.0, description="What the better model is worth at full confidence, in seconds of waiting."
    )


class Shadow(Strict):
    """Decide and record, but apply the default."""

    enabled: bool = False
    file: str = Field("", description="JSON lines, one a decision, no prompt text; relative: below the repository.")

    @model_validator(mode="after")
    def _recorded(self) -> Self:
        if self.enabled and not self.file:
            raise ValueError("file: missing; shadow mode without a record shows nothing")
        return self


class RoutingSettings(Strict):
    """How the router chooses the model for `auto`, and whether it thinks, where the client said nothing."""

    thinking: Literal["decide", "default"] = Field(
        "decide", description="`default`: always the model's thinking.default; rules and scorer are not asked."
    )
    small_model: str | None = Field(None, description="Answers `auto` where a small model will do, if it is awake.")
    warm: bool = Field(True, description="Load a better but cold model in the background.")
    rules: list[Rule] = Field(default_factory=list)
    shipped_rules: bool = Field(True, description="Apply routing/rules.yaml after your own.")
    scorer: Scorer = Scorer()
    sticky: Sticky = Sticky()
    shadow: Shadow = Shadow()
    min_answer_tokens: Annotated[int, Field(ge=1)] = Field(
        512, description="With a max_tokens below this the router never turns thinking on by itself."
    )
    thinking_budget: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Tokens of thinking where the router turned it on; unset: only what max_tokens leaves."
    )
    reasoning_fields: Literal["both", "reasoning", "reasoning_content"] = Field(
        "both", description="Under which name clients get the reasoning."
    )

    @model_validator(mode="after")
    def _names(self) -> Self:
        patterns = (pattern for rule in self.rules for pattern in _patterns_of(rule.when))
        size = sum(re2.compile(pattern).programsize for pattern in patterns)
        if size > MOST_INSTRUCTIONS_OF_ALL:
            raise ValueError(
                f"rules: their patterns have {size} RE2 instructions together, {MOST_INSTRUCTIONS_OF_ALL} are allowed"
            )
        seen: set[str] = set()
        for index, rule in enumerate(self.rules):
            if rule.name in seen:
                raise ValueError(f"rules[{index}].name: {rule.name} is there twice")
            seen.add(rule.name)
        return self
