"""serve_app.routing.decide where the client leaves it open: order of the stages, budgets, abstaining, cold models."""

from typing import Any

import pytest
from catalogs import decided
from judging import CATALOG, IMAGE, TOOLS, judged, past, rule, score, talk, tool_loop, verdicts

from serve_app.errors import ApiError
from serve_app.routing.decision import as_json
from serve_app.routing.lexical import shipped_lexicon

HARD = score(think=0.95, large=0.95)
EASY = score(think=0.05, large=0.05)
FOLLOW_UP = talk("prove that it halts", "First, …", "go ahead")
HARD_BEFORE = past(judged=True)


def refusal(body: dict[str, Any], **setting: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        judged(body, **setting)
    return error.value


# Thinking: the order of the stages. Each test gives its stage one answer and every weaker stage the other one.

THINKING_OFF = {"rules": [rule(thinking=False, when={"text": "."})]}
THINKING_ON = {"rules": [rule(thinking=True, when={"text": "."})]}


def test_model_that_cannot_think_decides_before_all_else() -> None:
    decision = judged(
        talk("hi", "hi", "go ahead", model="plain", reasoning_effort="high"),
        past=HARD_BEFORE,
        score=HARD,
        **THINKING_ON,
    )
    assert (decision.thinking, decision.thinking_source, decision.budget) == (False, "unsupported", None)


@pytest.mark.parametrize(
    ("fields", "source"),
    [
        ({"chat_template_kwargs": {"enable_thinking": True}}, "enable_thinking"),
        ({"thinking_token_budget": 500}, "thinking_token_budget"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"mode": "thinking"}, "mode"),
        ({"model": "auto:think"}, "profile"),
        ({"model": "large:think"}, "profile"),
    ],
)
def test_client_that_wants_thinking_gets_it_whatever_the_router_would_say(fields: dict[str, Any], source: str) -> None:
    body = talk("prove that it halts", "First, …", "go ahead", max_tokens=100, **fields)
    decision = judged(body, past=past(judged=False), score=EASY, **THINKING_OFF)
    assert (decision.thinking, decision.thinking_source) == (True, source)


@pytest.mark.parametrize(
    ("fields", "source"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking"),
        ({"thinking_token_budget": 0}, "thinking_token_budget"),
        ({"reasoning_effort": "none"}, "reasoning_effort"),
        ({"mode": "non_thinking"}, "mode"),
        ({"model": "auto:fast"}, "profile"),
        ({"model": "large:fast"}, "profile"),
    ],
)
def test_client_that_wants_no_thinking_gets_none_whatever_the_router_would_say(
    fields: dict[str, Any], source: str
) -> None:
    body = talk("prove that it halts", "First, …", "go ahead", **fields)
    decision = judged(body, past=HARD_BEFORE, score=HARD, **THINKING_ON)
    assert (decision.thinking, decision.thinking_source, decision.budget) == (False, source, None)


@pytest.mark.parametrize(("word", "wanted"), [("/think", True), ("/no_think", False)])
def test_soft_switch_beats_rule_and_score(word: str, wanted: bool) -> None:
    settings = THINKING_OFF if wanted else THINKING_ON
    decision = judged(talk(f"hello {word}"), score=EASY if wanted else HARD, **settings)
    assert (decision.thinking, decision.thinking_source) == (wanted, "soft_switch")


def test_clients_word_holds_inside_a_tool_loop() -> None:
    body = tool_loop(mode="non_thinking")
    decision = judged(body, past=past(body, thinking=True, model_id="hands"))
    assert (decision.thinking, decision.thinking_source) == (False, "mode")


def test_client_who_spoke_is_not_judged() -> None:
    decision = judged(talk("Prove it.", mode="thinking"), **THINKING_ON)
    assert decision.judged is None
    assert not decision.undecided


def test_too_few_tokens_beat_conversation_rule_and_score() -> None:
    decision = judged({**FOLLOW_UP, "max_tokens": 100}, past=HARD_BEFORE, score=HARD, **THINKING_ON)
    assert (decision.thinking, decision.thinking_source) == (False, "constraint")


def test_conversation_beats_rule_and_score() -> None:
    decision = judged(FOLLOW_UP, past=HARD_BEFORE, score=EASY, **THINKING_OFF)
    assert (decision.thinking, decision.thinking_source) == (True, "sticky")


def test_rule_beats_score() -> None:
    decision = judged(talk("hello"), score=EASY, **THINKING_ON)
    assert (decision.thinking, decision.thinking_source, decision.rule) == (True, "rule", "r")
    assert not decision.undecided


@pytest.mark.parametrize(("given", "wanted"), [(HARD, True), (EASY, False)])
def test_score_beats_the_default(given: Any, wanted: bool) -> None:
    decision = judged(talk("hello"), score=given)
    assert (decision.thinking, decision.thinking_source, decision.score) == (wanted, "scorer", given)


def test_default_decides_where_the_scorer_abstains() -> None:
    decision = judged(talk("hello"), score=score(think=0.55), scorer={"abstain": 0.1})
    assert (decision.thinking, decision.thinking_source) == (False, "default")


# The model: the order of the stages


PREFERS_CODER = {"rules": [rule(model="coder", when={"text": "."})], "small_model": "small"}


def test_model_that_the_client_names_beats_everything() -> None:
    body = talk("hello", model="plain")
    decision = judged(body, past=past(model_id="reader", tokens=90_000), score=EASY, **PREFERS_CODER)
    assert (decision.model_id, decision.model_source) == ("plain", "explicit")
    assert judged(talk("hello", model="big"), **PREFERS_CODER).model_source == "alias"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (talk("hello", model="plain", max_tokens=8192), "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": [IMAGE]}], "model": "plain"}, "unsupported_content"),
    ],
)
def test_what_no_model_can_do_beats_the_name(body: dict[str, Any], code: str) -> None:
    error = refusal(body)
    assert (error.status, error.code) == (400, code)


def test_conversation_keeps_its_model_against_a_rule() -> None:
    decision = judged(talk("a", "b", "c"), past=past(model_id="reader", tokens=20_000), score=EASY, **PREFERS_CODER)
    assert (decision.model_id, decision.model_source) == ("reader", "sticky")


def test_rule_for_the_model_beats_the_score() -> None:
    decision = judged(talk("hello"), score=EASY, **PREFERS_CODER)
    assert (decision.model_id, decision.model_source, decision.rule) == ("coder", "rule", "r")


def test_score_for_the_model_beats_the_default() -> None:
    decision = judged(talk("hello"), score=EASY, small_model="small")
    assert (decision.model_id, decision.model_source) == ("small", "scorer")
    decision = judged(talk("hello"), score=HARD, small_model="small")
    assert (decision.model_id, decision.model_source) == ("large", "scorer")


def test_default_model_answers_where_there_is_no_choice() -> None:
    decision = judged(talk("hello"), score=EASY)
    assert (decision.model_id, decision.model_source) == ("large", "default")


def test_thinking_and_model_have_each_a_source_of_their_own() -> None:
    rules = [rule("on", thinking=True)]
    decision = judged(talk("hello"), rules=rules, small_model="small", score=EASY)
    assert (decision.model_source, decision.thinking_source) == ("scorer", "rule")


@pytest.mark.parametrize(("size", "model_id"), [("small", "small"), ("large", "large")])
def test_rule_may_name_a_size(size: str, model_id: str) -> None:
    given = HARD if size == "small" else EASY
    decision = judged(talk("hello"), rules=[rule(size=size)], small_model="small", score=given)
    assert (decision.model_id, decision.model_source) == (model_id, "rule")


def test_size_means_nothing_where_there_is_no_small_model() -> None:
    decision = judged(talk("hello"), rules=[rule(size="small")])
    assert (decision.model_id, decision.model_source) == ("large", "default")


def test_rule_that_names_a_model_which_cannot_answer_is_passed_over() -> None:
    decision = judged(talk("hello"), tokens=7000, rules=[rule(model="former")])
    assert (decision.model_id, decision.model_source) == ("large", "default")


def test_small_model_that_cannot_answer_is_passed_over() -> None:
    decision = judged(talk("hello"), tokens=5000, small_model="small", score=EASY)
    assert (decision.model_id, decision.model_source) == ("large", "default")


# Room for the answer


@pytest.mark.parametrize(("max_tokens", "thinks"), [(1, False), (511, False), (512, True), (4000, True)])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_router_turns_thinking_on_only_where_the_answer_has_room(field: str, max_tokens: int, thinks: bool) -> None:
    by_rule = judged(talk("hello", **{field: max_tokens}), **THINKING_ON)
    by_score = judged(talk("hello", **{field: max_tokens}), score=HARD)
    assert (by_rule.thinking, by_score.thinking) == (thinks, thinks)


def test_room_that_is_needed_can_be_set() -> None:
    assert judged(talk("hello", max_tokens=100), min_answer_tokens=100, score=HARD).thinking
    assert not judged(talk("hello", max_tokens=99), min_answer_tokens=100, score=HARD).thinking


@pytest.mark.parametrize(
    ("rule_budget", "own", "max_tokens", "wanted"),
    [
        (None, None, None, None),
        (None, None, 1000, 750),
        (None, 300, None, 300),
        (None, 300, 1000, 300),
        (None, 900, 1000, 750),
        (400, 300, 1000, 400),
        (400, None, None, 400),
        (5000, None, 1000, 750),
        (9000, None, None, 6000),
    ],
)
def test_thinking_of_the_routers_own_leaves_a_quarter_for_the_answer(
    rule_budget: int | None, own: int | None, max_tokens: int | None, wanted: int | None
) -> None:
    then: dict[str, Any] = {"thinking": True} | ({"budget": rule_budget} if rule_budget else {})
    decision = judged(talk("hello", max_tokens=max_tokens), tokens=192, thinking_budget=own, rules=[rule(**then)])
    assert (decision.thinking, decision.budget) == (True, wanted)


def test_budget_of_a_rule_is_only_for_what_the_rule_decided() -> None:
    rules = [rule(thinking=True, budget=5)]
    assert judged(talk("hello", mode="thinking"), rules=rules).budget is None
    assert judged(talk("hello"), rules=rules).budget == 5


def test_answer_that_the_client_began_is_not_thought_about() -> None:
    body = talk("prove that 2 is prime", "Proof. Suppose")
    decision = judged(body, score=HARD, **THINKING_ON)
    assert (decision.thinking, decision.thinking_source) == (False, "constraint")
    assert judged({**body, "mode": "thinking"}).thinking


# Scorer


@pytest.mark.parametrize(
    ("think", "source", "wanted"),
    [
        (0.29, "scorer", False),
        (0.31, "default", False),
        (0.5, "default", False),
        (0.69, "default", False),
        (0.71, "scorer", True),
    ],
)
def test_scorer_abstains_within_the_band_around_its_threshold(think: float, source: str, wanted: bool) -> None:
    decision = judged(talk("hello"), score=score(think), scorer={"abstain": 0.2})
    assert (decision.thinking, decision.thinking_source) == (wanted, source)


def test_without_a_band_the_threshold_itself_thinks() -> None:
    assert judged(talk("hello"), score=score(0.5)).thinking
    assert not judged(talk("hello"), score=score(0.4999)).thinking


def test_thresholds_of_the_configuration_go_before_the_scorers_own() -> None:
    assert not judged(talk("hello"), score=score(0.8), scorer={"think_at": 0.9}).thinking
    assert judged(talk("hello"), score=score(0.3), scorer={"think_at": 0.2}).thinking
    small = judged(talk("hello"), score=score(large=0.7), small_model="small", scorer={"small_below": 0.8})
    assert small.model_id == "small"


def test_lexical_score_decides_until_another_is_there() -> None:
    decision = judged(talk("Prove that there are infinitely many primes p with p ≡ 3 (mod 4)."))
    assert decision.score
    assert decision.score.kind == "lexical"
    assert decision.undecided
    assert decision.score.think_at == shipped_lexicon().think_at


def test_decision_with_a_score_is_not_undecided() -> None:
    assert not judged(talk("hello"), score=EASY).undecided


# Default only


def test_with_thinking_default_nobody_is_asked() -> None:
    decision = judged(talk("Prove that pi is irrational."), thinking="default", score=HARD, **THINKING_ON)
    assert (decision.thinking, decision.thinking_source, decision.score) == (False, "default", None)
    assert not decision.undecided


def test_with_thinking_default_the_clients_word_still_holds() -> None:
    assert judged(talk("hello", mode="thinking"), thinking="default").thinking


# Cold models


def test_small_model_answers_where_it_is_awake() -> None:
    decision = judged(talk("thanks"), small_model="small", shipped_rules=True)
    assert (decision.model_id, decision.model_source, decision.better) == ("small", "rule", None)


def test_default_answers_for_a_small_model_that_is_cold() -> None:
    decision = judged(talk("thanks"), awake=["large"], small_model="small", shipped_rules=True)
    assert (decision.model_id, decision.model_source) == ("large", "fallback")
    assert (decision.better, decision.fallback) == ("small", "small is not awake; large answers")


def test_default_answers_for_a_better_model_that_is_cold() -> None:
    decision = judged(talk("hello"), awake=["large"], **PREFERS_CODER)
    assert (decision.model_id, decision.better) == ("large", "coder")


def test_model_that_the_client_names_is_waited_for() -> None:
    decision = judged(talk("hello", model="coder"), awake=["large"])
    assert (decision.model_id, decision.better, decision.fallback) == ("coder", None, None)


def test_resident_model_of_unknown_state_counts_as_awake() -> None:
    assert judged(talk("hello"), awake=[]).model_id == "large"


def test_conversation_stays_where_it_is_while_a_better_model_loads() -> None:
    before = past(model_id="reader", tokens=100)
    decision = judged(
        talk("a", "b", "c"), awake=["large", "reader"], past=before, sticky={"gain_s": 20}, **PREFERS_CODER
    )
    assert (decision.model_id, decision.better) == ("reader", "coder")


# What the default model cannot do


def with_image(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "what is this"}, IMAGE]}], **fields}


@pytest.mark.parametrize(
    ("body", "model_id"),
    [
        (talk("hello", tools=TOOLS), "hands"),
        (with_image(), "seer"),
        (talk("hello", response_format={"type": "json_object"}), "former"),
        (talk("word " * 10_000), "long-hands"),
        (talk("word " * 14_000), "reader"),
        (talk("hello", max_tokens=10_000), "long-hands"),
        (talk("word " * 8_000, tools=TOOLS), "long-hands"),
    ],
)
def test_auto_goes_to_a_model_that_can(body: dict[str, Any], model_id: str) -> None:
    decision = judged(body, score=EASY)
    assert (decision.model_id, decision.model_source) == (model_id, "constraint")


def test_tools_that_must_not_be_called_need_no_model_for_tools() -> None:
    assert judged(talk("hello", tools=TOOLS, tool_choice="none")).model_id == "large"


def test_of_the_models_that_can_one_that_is_awake_is_taken() -> None:
    assert judged(talk("hello", tools=TOOLS), awake=["large", "long-hands"]).model_id == "long-hands"


def test_exact_count_goes_before_the_estimate() -> None:
    assert judged(talk("hello"), tokens=8192).model_id == "long-hands"
    assert judged(talk("hello"), tokens=8191).model_id == "large"
    assert judged(talk("word " * 12_000), tokens=8000).model_id == "large"


def test_prompt_and_answer_together_must_fit() -> None:
    assert judged(talk("hello", max_tokens=4000), tokens=4192).model_id == "large"
    assert judged(talk("hello", max_tokens=4000), tokens=4193).model_id == "long-hands"


def test_prompt_that_fits_nowhere_is_refused_with_the_numbers() -> None:
    error = refusal(talk("hello", max_tokens=123), tokens=40_000)
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "messages")
    assert all(number in error.message for number in ("40000", "123", "32000"))


def test_prompt_that_is_far_too_long_is_refused_without_a_count() -> None:
    error = refusal(talk("word " * 100_000))
    assert error.code == "context_length_exceeded"
    assert "32000" in error.message


def test_prompt_that_may_fit_by_the_estimate_is_left_to_the_largest_model() -> None:
    assert judged(talk("word " * 30_000)).model_id == "reader"


def test_answer_larger_than_every_context_is_refused() -> None:
    error = refusal(talk("hello", max_tokens=32_000))
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert "32000" in error.message


def test_images_are_refused_where_no_model_takes_them() -> None:
    with pytest.raises(ApiError) as error:
        decided(with_image())
    assert (error.value.status, error.value.code, error.value.param) == (400, "unsupported_content", "messages")


def test_images_with_tools_are_not_told_that_no_model_takes_images() -> None:
    # `seer` does; it has no tools. It may answer, or the refusal says what really is missing.
    try:
        assert judged(with_image(tools=TOOLS)).model_id == "seer"
    except ApiError as error:
        assert error.message != "No model here takes images."  # noqa: PT017


def test_tools_with_a_schema_go_to_a_model_for_tools_where_none_can_both() -> None:
    assert judged(talk("hello", tools=TOOLS, response_format={"type": "json_object"})).model_id == "hands"


def test_prompt_too_long_for_the_default_goes_elsewhere_though_no_model_is_for_its_tools() -> None:
    body = talk("word " * 12_000, tools=TOOLS, response_format={"type": "json_object"})
    decision = judged(body)
    assert CATALOG.models[decision.model_id].context >= 15_000


def test_rule_chooses_among_the_models_that_can() -> None:
    rules = [rule(model="long-hands", when={"tools": True})]
    assert judged(talk("hello", tools=TOOLS), rules=rules).model_id == "long-hands"


def test_model_that_a_constraint_chose_thinks_by_rule_and_score() -> None:
    decision = judged(talk("hello", tools=TOOLS), score=HARD)
    assert (decision.model_id, decision.thinking, decision.thinking_source) == ("hands", True, "scorer")


# What is said about it


def test_every_stage_leaves_a_step() -> None:
    decision = judged(talk("hello"), small_model="small", score=EASY, rules=[rule(when={"text": "zzz"}, thinking=True)])
    assert [step for step, _ in verdicts(decision, "model")] == ["rule", "scorer"]
    assert [step for step, _ in verdicts(decision, "thinking")] == ["explicit", "sticky", "rule", "scorer"]


def test_last_step_says_what_was_decided() -> None:
    decision = judged(talk("hello"), score=HARD)
    assert verdicts(decision, "thinking")[-1] == ("scorer", "on: 0.95 from 0.50 (test)")
    assert verdicts(decision, "model")[-1] == ("default", "large")


def test_preview_has_the_fields_of_the_contract() -> None:
    answer = as_json(judged(talk("hello", max_tokens=1000), score=HARD, rules=[rule("picks", model="coder")]))
    steps = answer.pop("steps")
    assert answer == {
        "model": "coder",
        "thinking": True,
        "budget": 750,
        "sources": {"model": "rule", "thinking": "scorer"},
        "rule": "picks",
        "score": 0.95,
        "size_score": 0.95,
        "scorer": "test",
        "better_model": None,
        "fallback": None,
        "warnings": [],
    }
    assert all(set(step) == {"step", "about", "verdict"} for step in steps)


@pytest.mark.parametrize("about", ["model", "thinking"])
def test_steps_never_repeat_the_prompt(about: str) -> None:
    secret = "patient-4711"
    decision = judged(talk(secret, secret, f"continue {secret}", tools=TOOLS), shipped_rules=True, past=HARD_BEFORE)
    assert secret not in repr(verdicts(decision, about))
