"""serve_app.routing.decide: which model answers and what its engine is sent, for any body."""

import copy
import random
from typing import Any

import orjson
import pytest
from catalogs import ALL_AWAKE, CATALOG, CONFIG, PLAIN, chat, decided, sent
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st

from serve_app.catalog import catalog_of
from serve_app.config import Config
from serve_app.errors import ApiError
from serve_app.routing.decide import decide
from serve_app.routing.decision import Setting
from serve_app.routing.facts import Endpoint, read_facts
from serve_app.routing.lexical import Score
from serve_app.routing.outgoing import engine_body
from serve_app.routing.policy import ModelState, Policy, policy_of
from serve_app.routing.sticky import Past
from serve_app.routing_schema import RoutingSettings


def refusal(body: dict[str, Any], endpoint: Endpoint = "chat") -> ApiError:
    with pytest.raises(ApiError) as error:
        decided(body, endpoint)
    return error.value


@pytest.mark.parametrize(
    ("name", "model_id", "source"),
    [
        (None, "thinker", "default"),
        ("auto", "thinker", "default"),
        ("auto:think", "thinker", "default"),
        ("auto:fast", "thinker", "default"),
        ("thinker", "thinker", "explicit"),
        ("thinker:think", "thinker", "explicit"),
        ("big", "thinker", "alias"),
        ("big:fast", "thinker", "alias"),
        ("alias:with:colons", "thinker", "alias"),
        ("alias:with:colons:think", "thinker", "alias"),
        ("org/plain:1b", "org/plain:1b", "explicit"),
        ("org/plain:1b:fast", "org/plain:1b", "explicit"),
        ("named:fast", "named:fast", "explicit"),
        ("named:fast:think", "named:fast", "explicit"),
    ],
)
def test_model_is_found_by_id_alias_profile_or_default(name: str | None, model_id: str, source: str) -> None:
    decision = decided(chat(**({} if name is None else {"model": name})))
    assert (decision.model_id, decision.model_source) == (model_id, source)
    assert sent(chat(model=name))["model"] == model_id


@pytest.mark.parametrize(
    "name",
    [
        "nope",
        "Thinker",
        "thinker:",
        ":think",
        ":",
        "thinker:slow",
        "auto:",
        "auto:auto",
        "think:think:fast",
        "org/plain",
    ],
)
def test_unknown_model_is_a_404_that_does_not_repeat_the_name(name: str) -> None:
    error = refusal(chat(model=name))
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert "slow" not in error.message


def test_id_that_ends_like_a_profile_is_not_read_as_one() -> None:
    assert decided(chat(model="named:fast")).thinking_source == "default"


def test_profiles_switch_thinking() -> None:
    assert decided(chat(model="auto:think")).thinking
    assert not decided(chat(model="eager:fast")).thinking


@pytest.mark.parametrize(("model", "wanted"), [("thinker", False), ("eager", True)])
def test_models_default_decides_where_nobody_said_anything(model: str, wanted: bool) -> None:
    decision = decided(chat(model=model))
    assert (decision.thinking, decision.thinking_source, decision.budget) == (wanted, "default", None)


@pytest.mark.parametrize("fields", [{}, {"model": "auto"}, {"mode": "non_thinking"}, {"reasoning_effort": "none"}])
def test_not_thinking_is_always_said_explicitly(fields: dict[str, Any]) -> None:
    body = sent(chat(**fields))
    assert body["chat_template_kwargs"]["enable_thinking"] is False
    assert "thinking_token_budget" not in body


def test_words_for_the_router_do_not_reach_the_engine() -> None:
    body = sent(chat(mode="thinking", reasoning_effort="low"))
    assert "mode" not in body
    assert "reasoning_effort" not in body
    assert body["thinking_token_budget"] == 1024


@pytest.mark.parametrize(
    ("budget", "max_tokens", "wanted"),
    [(500, None, 500), (500, 1000, 500), (900, 1000, 750), (9000, 1000, 750), (5, 4, 3), (5, 1, 1)],
)
def test_budget_is_cut_so_that_a_quarter_stays_for_the_answer(budget: int, max_tokens: int | None, wanted: int) -> None:
    decision = decided(chat(thinking_token_budget=budget, max_tokens=max_tokens))
    assert decision.budget == wanted
    assert sent(chat(thinking_token_budget=budget, max_tokens=max_tokens))["thinking_token_budget"] == wanted


def test_budget_of_a_weaker_form_serves_a_stronger_form_without_one() -> None:
    body = chat(chat_template_kwargs={"enable_thinking": True}, reasoning_effort="low")
    assert decided(body).budget == 1024


def test_unlimited_effort_sends_no_budget() -> None:
    assert "thinking_token_budget" not in sent(chat(reasoning_effort="max", max_tokens=100))


def test_budget_is_dropped_when_thinking_is_off() -> None:
    body = chat(chat_template_kwargs={"enable_thinking": False}, thinking_token_budget=500)
    assert decided(body).budget is None
    assert "thinking_token_budget" not in sent(body)


@pytest.mark.parametrize("fields", [{"mode": "thinking"}, {"reasoning_effort": "high"}, {"thinking_token_budget": 9}])
def test_model_that_cannot_think_answers_plainly_and_says_so(fields: dict[str, Any]) -> None:
    decision = decided(chat(model="org/plain:1b", **fields))
    assert (decision.thinking, decision.thinking_source) == (False, "unsupported")
    assert decision.warnings == (f"org/plain:1b cannot think; {next(iter(fields))} was not followed",)
    assert "thinking_token_budget" not in sent(chat(model="org/plain:1b", **fields))


def test_asking_a_model_that_cannot_think_not_to_think_is_no_warning() -> None:
    assert decided(chat("/no_think", model="org/plain:1b")).warnings == ()
    assert "chat_template_kwargs" not in sent(chat("/no_think", model="org/plain:1b"))


@pytest.mark.parametrize(
    ("fields", "temperature", "top_p"),
    [
        ({}, 0.7, 0.8),
        ({"mode": "thinking"}, 0.6, 0.95),
        ({"temperature": 0, "mode": "thinking"}, 0, 0.95),
        ({"temperature": None, "top_p": 1}, 0.7, 1),
    ],
)
def test_sampling_defaults_of_the_mode_fill_only_what_is_unset(
    fields: dict[str, Any], temperature: float, top_p: float
) -> None:
    body = sent(chat(**fields))
    assert (body["temperature"], body["top_p"], body["top_k"]) == (temperature, top_p, 20)


def test_all_other_fields_reach_the_engine_as_they_came() -> None:
    extra = {
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.05,
        "vendor": {"deep": [None, True, "x"]},
        "structured_outputs": {"regex": "a|b"},
        "logprobs": True,
    }
    call = {"id": "1", "custom": None, "type": "function", "function": {"name": "f", "arguments": "{}", "y": 1}}
    messages = [
        {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [call]},
        {"role": "user", "content": "x /no_think"},
    ]
    body = sent({"messages": messages, "model": "big", **extra})
    assert {key: body[key] for key in extra} == extra
    assert body["messages"] == messages


def test_answer_that_leaves_no_room_for_the_prompt_is_refused_with_the_numbers() -> None:
    error = refusal(chat(model="eager", max_tokens=2048))
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "max_tokens")
    assert "2048" in error.message
    assert decided(chat(model="eager", max_tokens=2047)).model_id == "eager"


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_model_without_the_ability_is_refused(endpoint: Endpoint) -> None:
    error = refusal(chat(model="embedder", prompt="x"), endpoint)
    assert (error.status, error.param, error.code) == (400, "model", "unsupported_model")


# What generates nothing: tokens and scores


JUDGED: Policy = policy_of(
    catalog_of(
        Config.model_validate(
            {
                "models": [
                    *CONFIG.model_dump(exclude_defaults=True)["models"],
                    {"id": "judge", "aliases": ["bench"], "tier": "lazy", "source": "o/j", "context": 512}
                    | {"abilities": ["score"]},
                ]
            }
        )
    ),
    RoutingSettings(thinking="default"),
)
SCORE = {"text_1": "a", "text_2": ["b"]}
RERANK = {"query": "a", "documents": ["b"]}
TOKENS = {"tokens": [1, 2]}
TEXT = {"prompt": "a"}


@pytest.mark.parametrize(
    ("endpoint", "body", "model_id", "source"),
    [
        ("score", SCORE, "judge", "default"),
        ("rerank", RERANK | {"model": "auto"}, "judge", "default"),
        ("score", SCORE | {"model": "judge"}, "judge", "explicit"),
        ("rerank", RERANK | {"model": "bench"}, "judge", "alias"),
        ("tokenize", TEXT, "thinker", "default"),
        ("detokenize", TOKENS, "thinker", "default"),
        ("tokenize", TEXT | {"model": "embedder"}, "embedder", "explicit"),
        ("detokenize", TOKENS | {"model": "judge"}, "judge", "explicit"),
        ("tokenize", TEXT | {"model": "big:think"}, "thinker", "alias"),
    ],
)
def test_tokens_and_scores_come_from_the_named_model_or_the_first_that_can(
    endpoint: Endpoint, body: dict[str, Any], model_id: str, source: str
) -> None:
    decision = decided(body, endpoint, JUDGED)
    assert (decision.model_id, decision.model_source, decision.thinking) == (model_id, source, False)


@pytest.mark.parametrize("name", [None, "auto", "thinker", "embedder"])
@pytest.mark.parametrize(("endpoint", "body"), [("score", SCORE), ("rerank", RERANK)])
def test_scores_of_a_model_that_has_none_are_refused(
    endpoint: Endpoint, body: dict[str, Any], name: str | None
) -> None:
    error = refusal(body | {"model": name}, endpoint)
    assert (error.status, error.param, error.code) == (400, "model", "unsupported_model")


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("score", SCORE | {"stream": True, "truncate_prompt_tokens": 5}),
        ("rerank", RERANK | {"top_n": 1, "user": "u"}),
        ("tokenize", chat() | {"add_generation_prompt": False, "stream": True, "vendor": [None]}),
        ("tokenize", {"messages": [{"role": "developer", "content": "a"}, {"role": "user", "content": "b /think"}]}),
        ("detokenize", TOKENS),
    ],
)
def test_tokens_and_scores_are_asked_for_as_the_client_wrote_it(endpoint: Endpoint, body: dict[str, Any]) -> None:
    facts = read_facts(body, endpoint)
    decision = decide(facts, JUDGED, Setting(ALL_AWAKE))
    model = JUDGED.catalog.models[decision.model_id]
    assert engine_body(facts, decision, model) == body | {"model": model.id}


def test_completion_gets_no_template_arguments() -> None:
    assert "chat_template_kwargs" not in sent({"prompt": "x", "model": "thinker"}, "completions")


# Any body at all


class Bodies:
    """Random bodies: mostly right, with any JSON in any place. Drawn by hand: ten thousand cost seconds."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.secret = f"{self.rng.getrandbits(128):032x}"

    def any_json(self, depth: int = 2) -> Any:
        pick = self.rng.randrange(14)
        if pick > 11 and depth:
            return [self.any_json(depth - 1) for _ in range(self.rng.randrange(3))]
        if pick > 9 and depth:
            keys = ["", "text", "role", "enable_thinking", self.secret]
            return {self.rng.choice(keys): self.any_json(depth - 1) for _ in range(self.rng.randrange(3))}
        return self.rng.choice(
            [None, True, False, 0, 1, -1, 2**64 - 1, -(2**63), 0.5, -1e308, "", "/think", "auto", self.secret]
        )

    def kwargs(self) -> Any:
        switch = self.rng.choice([True, False, True, False, None, self.any_json()])
        return self.rng.choice([{"enable_thinking": switch}, {"enable_thinking": switch, "other": 1}, {}, None])

    def right(self, field: str) -> Any:
        pick = self.rng.choice
        return {
            "model": lambda: pick([*CATALOG.names, "auto", "auto:think", "thinker:fast", "no"]),
            "stream": lambda: pick([True, False]),
            "max_tokens": lambda: self.rng.randint(0, 12_000),
            "max_completion_tokens": lambda: self.rng.randint(1, 3000),
            "temperature": lambda: self.rng.uniform(-0.2, 2.2),
            "stop": lambda: pick(["x", ["x", "y"]]),
            "chat_template_kwargs": self.kwargs,
            "thinking_token_budget": lambda: self.rng.randint(-1, 5000),
            "reasoning_effort": lambda: pick(["none", "low", "high", "max", "extreme"]),
            "mode": lambda: pick(["thinking", "non_thinking", "both"]),
            "extra_body": lambda: {"chat_template_kwargs": self.kwargs(), "mode": "thinking", "model": "big"},
            "prompt": lambda: pick(["text", ["a", "b"], [1, 2]]),
            "tools": lambda: [{"type": "function"}],
            "vendor": self.any_json,
        }[field]()

    def body(self) -> dict[str, Any]:
        pick = self.rng.choice
        switch = pick(["hi", "/think", "a /no_think", "<think>", "x /think y\n/no_think", "<think></think>"])
        text = f"{self.secret} {switch}"
        content = pick([text] * 8 + [[{"type": "text", "text": text}, self.any_json()], self.any_json()])
        message = {"role": "user", "content": content}
        tool = {"role": "tool", "content": self.secret}
        body: dict[str, Any] = {"messages": pick([[message]] * 10 + [[message, tool], self.any_json()])}
        for field in self.rng.sample(FIELDS, self.rng.randrange(6)):
            odd = not self.rng.randrange(12)
            body[field] = self.any_json() if odd else self.right(field)
        return body


FIELDS = [
    "model",
    "stream",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "stop",
    "chat_template_kwargs",
    "thinking_token_budget",
    "reasoning_effort",
    "mode",
    "extra_body",
    "prompt",
    "tools",
    "vendor",
]


JUDGING = policy_of(
    CATALOG,
    RoutingSettings.model_validate(
        {
            "small_model": "named:fast",
            "thinking_budget": 900,
            "rules": [
                {"name": "tools", "when": {"tools": True}, "then": {"thinking": True, "budget": 5000}},
                {"name": "long", "when": {"ask_tokens": {"min": 20}}, "then": {"model": "eager"}},
            ],
        }
    ),
)


class Situations:
    """Random policies and settings: what else a decision depends on."""

    def __init__(self, rng: random.Random) -> None:
        self.policy: Policy = rng.choice([PLAIN, JUDGING])
        past = Past(
            turn="",
            model_id=rng.choice([*CATALOG.models, "gone"]),
            thinking=rng.random() < 0.5,
            budget=rng.choice([None, 300]),
            judged=rng.choice([None, True, False]),
            by_router=True,
            tokens=rng.randrange(20_000),
            at_s=0.0,
        )
        score = Score(rng.random(), rng.random(), 0.5, 0.5, "test")
        self.setting = Setting(
            view=rng.choice([ALL_AWAKE, {}, {"named:fast": ModelState(awake=False, wake_s=3)}]),
            past=rng.choice([None, past]),
            score=rng.choice([None, score]),
            tokens=rng.choice([None, None, 1, 9_000, 10**6]),
            now_s=rng.choice([0.0, 100.0]),
        )


def outcome(body: dict[str, Any], endpoint: Endpoint, seed: int) -> tuple[Any, ...]:
    situation = Situations(random.Random(seed))
    try:
        facts = read_facts(body, endpoint)
        decision = decide(facts, situation.policy, situation.setting)
        return decision, engine_body(facts, decision, CATALOG.models[decision.model_id])
    except ApiError as error:
        return error.status, orjson.dumps(error.payload())


@settings(
    max_examples=10_000,
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
)
@given(st.integers(0, 2**64))
def test_any_body_is_decided_or_refused_by_field_and_the_clients_choice_holds(
    seed: int,
) -> None:
    bodies = Bodies(seed)
    body, secret = bodies.body(), bodies.secret
    endpoint: Endpoint = "chat" if seed % 4 else "completions"
    note(repr(body))
    before = copy.deepcopy(body)
    result = outcome(body, endpoint, seed)
    assert body == before, "the client's body was changed"
    assert outcome(body, endpoint, seed) == result, "the same body was decided differently"
    if isinstance(result[0], int):
        status, payload = result
        assert status in (400, 404)
        assert secret.encode() not in payload, "the error repeats what the client wrote"
        return
    decision, engine = result
    orjson.dumps(engine)
    assert secret not in repr(decision)
    said = {
        **(before.get("extra_body") or {}),
        **{key: value for key, value in before.items() if value is not None},
    }
    if isinstance(said.get("model"), str) and said["model"] in CATALOG.names:
        assert decision.model_id == CATALOG.names[said["model"]], "the client's model was overridden"
    thinks = CATALOG.models[decision.model_id].thinking.supported
    hard = (said.get("chat_template_kwargs") or {}).get("enable_thinking")
    if thinks and endpoint == "chat" and isinstance(hard, bool):
        assert (decision.thinking, decision.thinking_source) == (hard, "enable_thinking")
    if thinks and endpoint == "chat":
        assert engine["chat_template_kwargs"]["enable_thinking"] is decision.thinking
    if decision.budget is not None:
        assert decision.thinking
        room = said.get("max_completion_tokens") or said.get("max_tokens") or CATALOG.models[decision.model_id].context
        assert decision.budget <= max(1, 0.75 * room), "no quarter is left for the answer"


@pytest.mark.case(86)
@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}])
def test_tools_for_a_model_that_is_not_set_up_for_them_are_a_400_that_wakes_nothing(choice: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    with pytest.raises(ApiError) as refused:
        decided(chat("Weather in Oslo?", model="org/plain:1b", tools=[tool], **choice))
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, "tools", "unsupported_tools")
    assert "org/plain:1b does not call tools" in refused.value.message
    for allowed in ({"tool_choice": "none"}, {"tool_choice": "required"}):
        assert decided(chat("x", model="org/plain:1b", tools=[tool], **allowed)).model_id == "org/plain:1b"
