"""serve_app.routing.thinking: every form in which clients say whether to think, and which one wins."""

import contextlib
from typing import Any

import pytest
from catalogs import chat, decided, sent

from serve_app.errors import ApiError
from serve_app.model_schema import DEFAULT_EFFORTS

# Every way to say it, strongest first: source, what says yes, what says no.
FORMS: list[tuple[str, dict[str, Any], dict[str, Any] | None]] = [
    (
        "enable_thinking",
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ),
    ("thinking_token_budget", {"thinking_token_budget": 100}, {"thinking_token_budget": 0}),
    ("reasoning_effort", {"reasoning_effort": "low"}, {"reasoning_effort": "none"}),
    ("soft_switch", {"text": "hello /think"}, {"text": "hello /no_think"}),
    ("think_tag", {"text": "<think> hello"}, None),
    ("mode", {"mode": "thinking"}, {"mode": "non_thinking"}),
    ("profile", {"model": "thinker:think"}, {"model": "thinker:fast"}),
]
PAIRS = [
    (strong, weak)
    for index, strong in enumerate(FORMS)
    for weak in FORMS[index + 1 :]
    if not (strong[0] == "soft_switch" and weak[0] == "think_tag")
]


@pytest.mark.case(65)
@pytest.mark.parametrize(("source", "yes", "no"), FORMS, ids=[form[0] for form in FORMS])
def test_each_form_is_understood_and_reaches_the_engine(
    source: str, yes: dict[str, Any], no: dict[str, Any] | None
) -> None:
    for fields, wanted in ((yes, True), (no, False)):
        if fields is not None:
            decision = decided(chat(**fields))
            assert (decision.thinking, decision.thinking_source) == (wanted, source)
            assert sent(chat(**fields))["chat_template_kwargs"]["enable_thinking"] is wanted


@pytest.mark.case(64, 65)
@pytest.mark.parametrize(("strong", "weak"), PAIRS, ids=[f"{a[0]}-over-{b[0]}" for a, b in PAIRS])
def test_the_stronger_form_wins_and_the_contradiction_is_said(strong: tuple, weak: tuple) -> None:  # type: ignore[type-arg]
    for mine, theirs, wanted in ((strong[1], weak[2], True), (strong[2], weak[1], False)):
        if mine is None or theirs is None:
            continue
        decision = decided(chat(**{**theirs, **mine}))
        assert (decision.thinking, decision.thinking_source) == (wanted, strong[0])
        assert decision.warnings == (f"{strong[0]} overrides {weak[0]}",)


@pytest.mark.parametrize(("strong", "weak"), PAIRS, ids=[f"{a[0]}-with-{b[0]}" for a, b in PAIRS])
def test_forms_that_agree_cause_no_warning(strong: tuple, weak: tuple) -> None:  # type: ignore[type-arg]
    assert decided(chat(**{**weak[1], **strong[1]})).warnings == ()


def test_soft_switch_beats_the_think_tag() -> None:
    decision = decided(chat("<think> hello /no_think"))
    assert (decision.thinking, decision.thinking_source) == (False, "soft_switch")
    assert decision.warnings == ("soft_switch overrides think_tag",)


def test_every_overridden_form_is_warned_about() -> None:
    body = chat("a /think", chat_template_kwargs={"enable_thinking": False}, reasoning_effort="high", mode="thinking")
    assert decided(body).warnings == (
        "enable_thinking overrides reasoning_effort",
        "enable_thinking overrides soft_switch",
        "enable_thinking overrides mode",
    )


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("/no_think", False),
        ("/think", True),
        ("first\n/no_think\nlast", False),
        ("/think then /no_think", False),
        ("/no_think then /think", True),
        ("问题 /no_think", False),
        ("see /usr/think", None),
        ("/thinking", None),
        ("a/think", None),
        ("(/no_think)", None),
        ("rethink /no_thinking", None),
    ],
)
def test_soft_switch_counts_only_where_it_stands_alone_and_the_last_one_wins(text: str, wanted: bool | None) -> None:
    decision = decided(chat(text))
    assert decision.thinking_source == ("default" if wanted is None else "soft_switch")
    assert decision.thinking is bool(wanted)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<think>", True),
        ("  <think>\nhow so?", True),
        ("how so? <think>\n", True),
        ("what does <think> do?", False),
        ("<think>old thoughts</think> go on", False),
    ],
)
def test_bare_think_tag_counts_at_either_end_and_quoted_pairs_do_not(text: str, wanted: bool) -> None:
    assert decided(chat(text)).thinking is wanted


def test_only_the_last_user_message_is_read_for_switches() -> None:
    messages = [
        {"role": "user", "content": "/think"},
        {"role": "assistant", "content": "/think"},
        {"role": "user", "content": "go on"},
        {"role": "tool", "content": "/think"},
    ]
    assert decided({"messages": messages}).thinking_source == "default"


@pytest.mark.parametrize(
    ("system", "wanted"),
    [
        ("/no_think", False),
        ("You are brief. /no_think", False),
        ("/think\nYou are thorough.", True),
        ("/think first, and then /no_think", False),
        ("Users may write /think to see you think.", None),
        ("See /usr/bin/think", None),
    ],
)
def test_a_switch_at_either_end_of_the_system_prompt_counts(system: str, wanted: bool | None) -> None:
    decision = decided({"messages": [{"role": "system", "content": system}, *chat("hi")["messages"]]})
    assert decision.thinking_source == ("default" if wanted is None else "soft_switch")
    assert decision.thinking is bool(wanted)


def test_the_users_switch_beats_that_of_the_system_prompt() -> None:
    messages = [{"role": "system", "content": "Be brief. /no_think"}, *chat("prove it /think")["messages"]]
    assert decided({"messages": messages}).thinking is True


def test_switch_in_a_text_part_counts() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hm"}, {"type": "text", "text": "/think"}]}]
    assert decided({"messages": messages}).thinking_source == "soft_switch"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": {"enable_thinking": "false"}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": {"enable_thinking": 0}}, "chat_template_kwargs.enable_thinking"),
        ({"think": 1}, "think"),
        ({"think": "hard"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"enable_thinking": []}}, "chat_template_kwargs.enable_thinking"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"thinking_token_budget": 1.5}, "thinking_token_budget"),
        ({"thinking_token_budget": True}, "thinking_token_budget"),
        ({"thinking_token_budget": {}}, "thinking_token_budget"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"reasoning_effort": ["high"]}, "reasoning_effort"),
        ({"reasoning_effort": {}}, "reasoning_effort"),
        ({"mode": "fast"}, "mode"),
        ({"mode": []}, "mode"),
        ({"mode": True}, "mode"),
    ],
)
@pytest.mark.parametrize("model", ["thinker", "org/plain:1b"])
def test_wrong_value_is_a_400_that_names_the_field(fields: dict[str, Any], param: str, model: str) -> None:
    with pytest.raises(ApiError) as error:
        decided(chat(model=model, **fields))
    assert (error.value.status, error.value.param) == (400, param)


@pytest.mark.parametrize(("effort", "budget"), DEFAULT_EFFORTS.items())
def test_effort_becomes_a_budget(effort: str, budget: int | None) -> None:
    decision = decided(chat(reasoning_effort=effort))
    assert decision.thinking is (budget != 0)
    assert decision.budget == (budget or None)


@pytest.mark.parametrize(
    ("think", "source", "thinking"),
    [(True, "enable_thinking", True), (False, "enable_thinking", False), ("low", "reasoning_effort", True)],
)
def test_ollamas_word_is_understood(think: Any, source: str, thinking: bool) -> None:
    decision = decided(chat("hi", think=think))
    assert (decision.thinking, decision.thinking_source) == (thinking, source)
    assert "think" not in sent(chat("hi", think=think))
    assert decided(chat("hi", think=think, enable_thinking=not thinking)).thinking is not thinking


def test_null_switch_is_no_switch() -> None:
    decision = decided(chat(chat_template_kwargs={"enable_thinking": None}, mode="thinking"))
    assert decision.thinking_source == "mode"


def test_other_template_arguments_do_not_switch_and_are_kept() -> None:
    body = chat(chat_template_kwargs={"preserve_thinking": True}, model="eager")
    assert sent(body)["chat_template_kwargs"] == {"preserve_thinking": True, "enable_thinking": True}


def test_a_megabyte_of_switches_is_read_in_no_time() -> None:
    for text in ("/no_think" * 120_000, " " * 1_000_000 + "<think>x", "<think> " * 130_000 + "x"):
        with contextlib.suppress(ApiError):  # most are longer than any context here
            decided(chat(text))


@pytest.mark.parametrize(
    ("fields", "thinking", "budget"),
    [
        ({"thinking": {"type": "enabled"}}, True, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 64}}, True, 64),
        ({"thinking": {"type": "disabled", "budget_tokens": 64}}, False, None),
        ({"reasoning": {"enabled": True}}, True, None),
        ({"reasoning": {"enabled": False, "effort": "high"}}, False, None),
        ({"reasoning": {"effort": "none"}}, False, None),
        ({"reasoning": {"max_tokens": 64}}, True, 64),
    ],
    ids=str,
)
def test_other_servers_words_are_understood(fields: dict[str, Any], thinking: bool, budget: int | None) -> None:
    decision = decided(chat(**fields))
    assert (decision.thinking, decision.thinking_source) == (thinking, next(iter(fields)))
    assert budget is None or decision.budget == budget
    body = sent(chat(**fields))
    assert body["chat_template_kwargs"]["enable_thinking"] is thinking
    assert not {"thinking", "reasoning"} & set(body)


@pytest.mark.parametrize("fields", [{"thinking": {"type": "adaptive"}}, {"reasoning": {"exclude": True}}], ids=str)
def test_other_servers_words_that_leave_it_open_decide_nothing(fields: dict[str, Any]) -> None:
    assert decided(chat(**fields)).thinking_source == "default"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking": True}, "thinking"),
        ({"thinking": {"type": "sometimes"}}, "thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": "all"}}, "thinking.budget_tokens"),
        ({"reasoning": "high"}, "reasoning"),
        ({"reasoning": {"effort": "turbo"}}, "reasoning.effort"),
        ({"reasoning": {"max_tokens": -1}}, "reasoning.max_tokens"),
    ],
    ids=str,
)
def test_other_servers_words_that_are_wrong_are_a_400_that_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        decided(chat(**fields))
    assert (refused.value.status, refused.value.param) == (400, param)
