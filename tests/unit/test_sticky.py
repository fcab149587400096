"""serve_app.routing.sticky and what `decide` makes of it: what a conversation keeps, and what a switch costs."""

from typing import Any

import pytest
from judging import CATALOG, IMAGE, TOOLS, WAKE_S, judged, past, rule, score, talk, tool_loop

from serve_app.routing.decision import Decision
from serve_app.routing.excerpt import read_excerpt
from serve_app.routing.sticky import Past, conversation_key, switch_cost_s, turn_id
from serve_app.routing_schema import Sticky

HARD = score(think=0.95, large=0.95)
EASY = score(think=0.05, large=0.05)


def remembered(body: dict[str, Any], decision: Decision, at_s: float = 0.0) -> Past:
    """What the Router keeps of a decision."""
    excerpt = read_excerpt(body["messages"], body.get("tools") or ())
    return Past(
        turn=turn_id(excerpt),
        model_id=decision.model_id,
        thinking=decision.thinking,
        budget=decision.budget,
        judged=decision.judged,
        by_router=True,
        tokens=excerpt.prompt_tokens,
        at_s=at_s,
    )


# Which conversation it is


def key(body: dict[str, Any] | None = None, session: str | None = None, who: str = "k") -> str:
    return conversation_key(body or talk("hello"), session, who)


def test_next_turn_is_the_same_conversation() -> None:
    assert key(talk("hello")) == key(talk("hello", "hi", "and now?"))


def test_round_of_a_tool_loop_is_the_same_conversation() -> None:
    assert key(talk("hello")) == key(tool_loop("hello")) == key(tool_loop("hello", rounds=3))


@pytest.mark.parametrize(
    "other",
    [
        talk("hello!"),
        talk("hello", user="bob"),
        {"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]},
    ],
)
def test_other_opening_or_user_is_another_conversation(other: dict[str, Any]) -> None:
    assert key(other) != key()


@pytest.mark.parametrize("session", [None, "s1"])
def test_conversations_of_two_keys_are_never_one(session: str | None) -> None:
    assert key(session=session, who="k1") != key(session=session, who="k2")


def test_session_goes_before_the_opening() -> None:
    assert key(talk("hello"), "s1") == key(talk("something else"), "s1")
    assert key(session="s1") != key(session="s2")


@pytest.mark.parametrize("conversation", ["c1", {"id": "c1"}])
def test_conversation_field_names_it_as_text_or_object(conversation: object) -> None:
    assert key(talk("hello", conversation=conversation)) == key(talk("other", conversation="c1"))


@pytest.mark.parametrize("conversation", [None, "", {}, {"id": None}, {"id": 7}, 7, [], ["c1"]])
def test_conversation_field_of_another_form_names_none(conversation: object) -> None:
    assert key(talk("hello", conversation=conversation)) == key(talk("hello"))


def test_empty_session_names_none() -> None:
    assert key(session="") == key()


def test_session_is_not_mistaken_for_an_opening() -> None:
    assert key(talk("hello", user="x"), session=None) != key(talk("hello", user="x"), session="hello")


@pytest.mark.parametrize(
    ("one", "other"), [(("ab", "c"), ("a", "bc")), (("", "abc"), ("abc", "")), (("a\x00", "b"), ("a", "\x00b"))]
)
def test_parts_of_a_key_do_not_run_into_each_other(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert key(session=one[1], who=one[0]) != key(session=other[1], who=other[0])


@pytest.mark.parametrize("user", [7, None, ["bob"], {"id": "bob"}])
def test_odd_user_field_is_no_user(user: object) -> None:
    assert key(talk("hello", user=user)) == key(talk("hello"))


def test_chat_without_a_user_message_has_a_key_too() -> None:
    assert key({"messages": [{"role": "system", "content": None}]})


def test_opening_of_a_megabyte_is_read_to_its_limit() -> None:
    assert key(talk("a" * 4096 + "b" * 1_000_000)) == key(talk("a" * 4096 + "c"))


def test_turn_is_the_same_for_all_requests_of_a_tool_loop() -> None:
    turns = {turn_id(read_excerpt(tool_loop("ask", rounds=rounds)["messages"])) for rounds in (1, 2, 5)}
    assert turns == {turn_id(read_excerpt(talk("ask")["messages"]))}


def test_same_words_in_a_later_turn_are_another_turn() -> None:
    assert turn_id(read_excerpt(talk("go")["messages"])) != turn_id(read_excerpt(talk("go", "x", "go")["messages"]))


# Inside a tool loop


@pytest.mark.parametrize("thinking", [True, False])
def test_tool_loop_keeps_model_mode_and_budget(thinking: bool) -> None:
    body = tool_loop("look it up", rounds=2)
    before = past(body, model_id="long-hands", thinking=thinking, budget=300 if thinking else None, judged=thinking)
    rules = [rule(when={"text": "."}, thinking=not thinking, size="large")]
    decision = judged(body, past=before, score=EASY if thinking else HARD, rules=rules)
    assert (decision.thinking, decision.thinking_source, decision.budget) == (thinking, "sticky", before.budget)
    assert decision.judged is thinking


def test_tool_loop_keeps_its_model_against_a_rule() -> None:
    body = tool_loop("look it up", tool_choice="none")
    decision = judged(body, past=past(body, model_id="reader"), rules=[rule(when={"text": "."}, model="coder")])
    assert (decision.model_id, decision.model_source) == ("reader", "sticky")


def test_tool_loop_keeps_its_model_where_the_default_has_no_tools() -> None:
    body = tool_loop("look it up")
    assert "tools" not in CATALOG.models["large"].abilities
    first = judged(talk("look it up", tools=TOOLS), awake=["large", "long-hands"])
    assert first.model_id == "long-hands"
    # `hands` woke up meanwhile; it has the smaller context, and is no reason to change.
    assert judged(body, past=remembered(body, first)).model_id == "long-hands"


def test_whole_tool_loop_has_one_model_and_one_mode() -> None:
    body = talk("what is it worth", tools=TOOLS, tool_choice="auto")
    first = judged(body, score=HARD)
    before = remembered(body, first)
    for rounds in range(1, 6):
        body = tool_loop("what is it worth", rounds=rounds)
        decision = judged(body, past=before, score=EASY if rounds % 2 else HARD)
        assert (decision.model_id, decision.thinking) == (first.model_id, first.thinking)
        before = remembered(body, decision)


def test_tool_loop_leaves_a_model_whose_context_is_full() -> None:
    body = tool_loop("look it up")
    assert judged(body, past=past(body, model_id="hands"), tokens=9000).model_id == "long-hands"


def test_next_turn_after_a_tool_loop_is_judged_anew() -> None:
    loop = tool_loop("look it up")
    body = {**loop, "messages": [*loop["messages"], {"role": "assistant", "content": "42"}, *talk("why")["messages"]]}
    decision = judged(body, past=past(loop, thinking=True, judged=True), score=EASY)
    assert (decision.thinking, decision.thinking_source) == (False, "scorer")


def test_tool_loop_nobody_remembers_is_judged() -> None:
    assert judged(tool_loop(), score=HARD).thinking_source == "scorer"


# Follow-ups


@pytest.mark.parametrize(
    "text",
    [
        "go ahead",
        "Yes, please.",
        "ok",
        "continue",
        "do it",
        "sure, go on",
        "why?",
        "继续",
        "好的",
        "继续吧。",
        "开始吧",
        "然后呢？",
    ],
)
@pytest.mark.parametrize("hard", [True, False])
def test_follow_up_inherits_the_difficulty_of_what_it_follows(text: str, hard: bool) -> None:
    decision = judged(talk("prove it", "First, …", text), past=past(judged=hard), score=EASY if hard else HARD)
    assert (decision.thinking, decision.thinking_source, decision.judged) == (hard, "sticky", hard)


@pytest.mark.parametrize("text", ["thanks", "thank you!", "ok thanks", "谢谢", "好的，谢谢", "明白了"])
def test_thanks_inherit_nothing(text: str) -> None:
    decision = judged(talk("prove it", "Proof …", text), past=past(judged=True, thinking=True), shipped_rules=True)
    assert (decision.thinking, decision.thinking_source) == (False, "rule")


@pytest.mark.parametrize(
    "text", ["ok, and what is the capital of France?", "好的，那北京明天天气怎么样", "translate it"]
)
def test_turn_that_asks_something_of_its_own_inherits_nothing(text: str) -> None:
    assert judged(talk("prove it", "Proof …", text), past=past(judged=True), score=EASY).thinking_source != "sticky"


def test_first_message_follows_nothing() -> None:
    assert judged(talk("continue"), past=past(judged=True), score=EASY).thinking_source == "scorer"


def test_follow_up_of_what_the_client_switched_is_judged() -> None:
    first = judged(talk("prove it", mode="thinking"))
    body = talk("prove it", "First, …", "continue")
    assert judged(body, past=remembered(body, first), score=EASY).thinking_source == "scorer"


@pytest.mark.parametrize("settings", [{}, {"small_model": "small"}])
def test_follow_up_of_a_follow_up_inherits_too(settings: dict[str, Any]) -> None:
    texts = ["Plan the migration of the cluster."]
    before: Past | None = None
    for _ in range(4):
        body = talk(*texts)
        decision = judged(body, past=before, score=HARD if before is None else EASY, **settings)
        assert decision.thinking
        before = remembered(body, decision)
        texts += ["Step …", "continue"]


def test_follow_up_of_something_for_the_large_model_is_not_for_the_small_one() -> None:
    first = judged(talk("Plan the migration."), score=HARD, small_model="small")
    body = talk("Plan the migration.", "Step …", "continue")
    before = remembered(talk("Plan the migration."), first)
    assert first.model_id == "large"
    assert judged(body, past=before, score=EASY, small_model="small").model_id == "large"


def test_follow_up_in_an_agents_wrapping_inherits() -> None:
    wrapped = "<environment_details>\n" + "src/main.py\n" * 50 + "</environment_details>\ngo ahead"
    decision = judged(talk("plan it", "First, …", wrapped), past=past(judged=True), score=EASY)
    assert (decision.thinking, decision.thinking_source) == (True, "sticky")


def test_switched_off_nothing_is_kept() -> None:
    off = {"sticky": {"enabled": False}}
    assert judged(talk("a", "b", "go ahead"), past=past(judged=True), score=EASY, **off).thinking_source == "scorer"
    body = tool_loop(tool_choice="none")
    assert judged(body, past=past(body, model_id="reader"), **off).model_id == "large"


# What a switch costs


def test_switch_costs_the_prefill_of_what_is_cached() -> None:
    assert switch_cost_s(past(tokens=10_000), Sticky(), now_s=0, load_s=0) == 2.0
    assert switch_cost_s(past(tokens=10_000), Sticky(prefill_tokens_per_s=1000), now_s=0, load_s=0) == 10.0


def test_switch_costs_the_load_too() -> None:
    assert switch_cost_s(past(tokens=10_000), Sticky(), now_s=0, load_s=8) == 10.0


@pytest.mark.parametrize(("idle_s", "cost"), [(0, 2.0), (300, 1.0), (600, 0.5), (1200, 0.125)])
def test_cost_halves_with_idle_time(idle_s: float, cost: float) -> None:
    given = past(tokens=10_000, at_s=50.0)
    assert switch_cost_s(given, Sticky(), now_s=50.0 + idle_s, load_s=0) == pytest.approx(cost)


def test_load_does_not_become_cheaper_with_idle_time() -> None:
    assert switch_cost_s(past(tokens=10_000), Sticky(), now_s=1e6, load_s=8) == pytest.approx(8)


def test_clock_that_went_back_makes_nothing_dearer() -> None:
    assert switch_cost_s(past(tokens=10_000, at_s=100), Sticky(), now_s=0, load_s=0) == 2.0


# With small_below at a half, `large` 0.25 is a gain of a half: worth half of gain_s, 1 s.
@pytest.mark.parametrize(
    ("tokens", "large", "model_id", "source"),
    [
        (4_900, 0.25, "small", "scorer"),
        (5_100, 0.25, "large", "sticky"),
        (5_100, 0.05, "small", "scorer"),
        (100, 0.499, "large", "sticky"),
        (0, 0.499, "small", "scorer"),
    ],
)
def test_model_is_kept_unless_the_gain_is_worth_more_than_the_switch(
    tokens: int, large: float, model_id: str, source: str
) -> None:
    decision = judged(talk("a", "b", "c"), past=past(tokens=tokens), score=score(large=large), small_model="small")
    assert (decision.model_id, decision.model_source) == (model_id, source)


def test_model_is_given_up_after_a_long_pause() -> None:
    given = {"past": past(tokens=9_000), "score": score(large=0.25), "small_model": "small"}
    assert judged(talk("a", "b", "c"), **given, now_s=60).model_id == "large"
    assert judged(talk("a", "b", "c"), **given, now_s=600).model_id == "small"


def test_load_of_the_other_model_is_part_of_the_price() -> None:
    given = {"past": past(tokens=10), "score": score(large=0.05), "small_model": "small"}
    cold = judged(talk("a", "b", "c"), **given, awake=["large"])
    assert (cold.model_id, cold.model_source, cold.better) == ("large", "sticky", None)
    dear = judged(talk("a", "b", "c"), **given, awake=["large"], sticky={"gain_s": 2 * WAKE_S})
    assert (dear.model_id, dear.model_source, dear.better) == ("large", "fallback", "small")


def test_rule_is_worth_the_full_gain() -> None:
    rules = [rule(when={"text": "."}, model="coder")]
    assert judged(talk("a", "b", "c"), past=past(model_id="large", tokens=9_000), rules=rules).model_id == "coder"
    assert judged(talk("a", "b", "c"), past=past(model_id="large", tokens=11_000), rules=rules).model_id == "large"


def test_model_that_fell_asleep_is_not_kept() -> None:
    decision = judged(talk("a", "b", "c"), past=past(model_id="reader", tokens=9_000), awake=["large"])
    assert (decision.model_id, decision.model_source) == ("large", "default")


@pytest.mark.parametrize("model_id", ["gone", "seer"])
def test_model_that_cannot_answer_any_more_is_not_kept(model_id: str) -> None:
    assert judged(talk("a", "b", "c"), past=past(model_id=model_id, tokens=9_000), tokens=5000).model_id == "large"


def test_image_in_the_conversation_ends_the_stay() -> None:
    body = {"messages": [*talk("a", "b")["messages"], {"role": "user", "content": [IMAGE]}]}
    assert judged(body, past=past(model_id="reader", tokens=9_000)).model_id == "seer"


def test_client_that_names_a_model_is_not_kept_from_it() -> None:
    body = tool_loop(model="hands")
    assert judged(body, past=past(body, model_id="long-hands")).model_id == "hands"
