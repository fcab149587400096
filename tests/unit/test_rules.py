"""serve_app.routing.rules and the schema of `routing.rules`: what holds, which rule decides, what is refused where."""

import dataclasses
import random
import time
from typing import Any

import pytest
from judging import IMAGE, TOOLS, judged, rule, talk, tool_loop, verdicts

from serve_app.catalog import catalog_of
from serve_app.config import ConfigError, parse_config
from serve_app.routing.excerpt import read_excerpt
from serve_app.routing.facts import read_facts
from serve_app.routing.policy import policy_of
from serve_app.routing.rules import Patterns, Request, Rules, shipped_rules, tasks_of
from serve_app.routing_schema import Rule, When

THINK = {"thinking": True}


def asked(body: dict[str, Any] | str, **fields: Any) -> Request:
    """What rules see of a chat body; a text alone is its only message."""
    facts = read_facts(talk(body) if isinstance(body, str) else body, "chat")
    excerpt = read_excerpt(facts.body["messages"], facts.body.get("tools") or ())
    request = Request(excerpt, tasks_of(excerpt.instruction), facts.model, facts.json_schema)
    return dataclasses.replace(request, **fields)


def holds(when: dict[str, Any], request: Request) -> bool:
    """Whether a rule with this condition decides."""
    made = Rule.model_validate({"name": "r", "when": when, "then": THINK})
    return Rules([made]).decisive(request)[0] is made


def deciding(rules: list[dict[str, Any]], body: dict[str, Any] | str) -> tuple[str | None, str | None]:
    """The names of the rules that decide about thinking and about the model."""
    found = Rules([Rule.model_validate(entry) for entry in rules]).decisive(asked(body))
    return found[0] and found[0].name, found[1] and found[1].name


def headers(**given: str) -> dict[str, Any]:
    return {"header": {name.replace("_", "-"): value for name, value in given.items()}.get}


def words(count: int) -> str:
    """A text of about so many tokens."""
    return "word " * count


# Conditions


@pytest.mark.parametrize(
    ("when", "yes", "no"),
    [
        ({"text": "sched(ule|uling)"}, asked("make a schedule"), asked("make a shed")),
        ({"text": ["a{3}", "b{3}"]}, asked("x bbb"), asked("aabb")),
        ({"text": "^Task"}, asked("Task: sort"), asked("the Task")),
        ({"text": "排班|调度"}, asked("帮我排班"), asked("帮我翻译")),
        ({"not_text": "quick"}, asked("slow"), asked("be quick")),
        ({"not_text": ["a{3}", "b{3}"]}, asked("aabb"), asked("x bbb")),
        ({"text": "plan", "not_text": "plane"}, asked("a plan"), asked("a plane")),
        ({"task": "translate"}, asked("翻译成英文"), asked("你好")),
        ({"task": ["chat", "closing"]}, asked("thanks"), asked("sort this list")),
        ({"not_task": "translate"}, asked("hello"), asked("Translate this: hello")),
        ({"language": "zh"}, asked("今天天气怎么样"), asked("how are you")),
        ({"language": ["en", "mixed"]}, asked("用 python 写 quicksort 的 code"), asked("今天天气怎么样")),
        ({"ask_tokens": {"min": 100}}, asked(words(200)), asked(words(10))),
        ({"ask_tokens": {"max": 100}}, asked(words(10)), asked(words(200))),
        ({"prompt_tokens": {"min": 200}}, asked(talk(words(400), "ok", "go")), asked(talk("x", "ok", "go"))),
        ({"prompt_tokens": {"min": 5, "max": 50}}, asked("hi"), asked(words(400))),
        ({"turns": {"min": 2, "max": 2}}, asked(talk("a", "b", "c")), asked("a")),
        ({"turns": {"max": 1}}, asked("a"), asked(talk("a", "b", "c"))),
        ({"tools": True}, asked(talk("x", tools=TOOLS)), asked("x")),
        ({"tools": False}, asked("x"), asked(talk("x", tools=TOOLS))),
        ({"tool_loop": True}, asked(tool_loop()), asked(talk("x", tools=TOOLS))),
        ({"tool_loop": False}, asked(talk("x", tools=TOOLS)), asked(tool_loop())),
        ({"json_schema": True}, asked(talk("x", response_format={"type": "json_object"})), asked("x")),
        ({"json_schema": False}, asked(talk("x", response_format={"type": "text"})), asked(talk("x", guided_json={}))),
        ({"json_schema": True}, asked(talk("x", structured_outputs={"choice": ["a"]})), asked("x")),
        ({"images": True}, asked({"messages": [{"role": "user", "content": [IMAGE]}]}), asked("x")),
        ({"images": False}, asked("x"), asked({"messages": [{"role": "user", "content": [IMAGE]}]})),
        (
            {"system": True},
            asked({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]}),
            asked("x"),
        ),
        (
            {"system": False},
            asked({"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "x"}]}),
            asked({"messages": [{"role": "developer", "content": "s"}, {"role": "user", "content": "x"}]}),
        ),
        ({"model": "auto:think"}, asked(talk("x", model="auto:think")), asked(talk("x", model="auto"))),
        ({"model": ["a", "auto"]}, asked(talk("x", model="auto")), asked("x")),
        ({"header": {"x-tier": "^gold"}}, asked("x", **headers(x_tier="golden")), asked("x", **headers(x_tier="old"))),
        ({"header": {"X-Tier": "gold"}}, asked("x", **headers(x_tier="gold")), asked("x")),
        (
            {"header": {"x-a": "1", "x-b": "2"}},
            asked("x", **headers(x_a="1", x_b="2")),
            asked("x", **headers(x_a="1", x_b="3")),
        ),
        ({"key": "0123456789ab"}, asked("x", key="0123456789ab"), asked("x", key="0123456789ac")),
        ({"key": ["0" * 12, "1" * 12]}, asked("x", key="1" * 12), asked("x")),
    ],
)
def test_condition_holds_where_it_should_and_nowhere_else(when: dict[str, Any], yes: Request, no: Request) -> None:
    assert holds(when, yes)
    assert not holds(when, no)


def test_table_of_conditions_leaves_none_out() -> None:
    table = next(mark for mark in test_condition_holds_where_it_should_and_nowhere_else.pytestmark)  # type: ignore[attr-defined]
    assert {name for when, _, _ in table.args[1] for name in when} == set(When.model_fields)


def test_all_conditions_of_a_rule_must_hold() -> None:
    when = {"text": "plan", "language": "en", "turns": {"max": 1}}
    assert holds(when, asked("plan it"))
    assert not holds(when, asked(talk("plan it", "ok", "plan it")))
    assert not holds(when, asked("请把这个 plan 翻译成中文好吗"))


@pytest.mark.parametrize("bounds", [{"min": 3, "max": 3}, {"min": 3}, {"max": 3}])
def test_bounds_are_included(bounds: dict[str, int]) -> None:
    assert holds({"turns": bounds}, asked(talk("a", "b", "c", "d", "e")))


def test_text_is_searched_in_the_last_user_message_only() -> None:
    assert not holds({"text": "prove"}, asked(talk("prove it", "I prove", "thanks")))


def test_text_is_not_searched_in_what_a_harness_put_in() -> None:
    assert not holds({"text": "prove"}, asked("<context>prove it</context> thanks"))


@pytest.mark.parametrize(
    "field", ["guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "response_format"]
)
def test_schema_that_is_null_is_none(field: str) -> None:
    assert not asked(talk("x", **{field: None})).json_schema


# Which rule decides


def test_first_rule_that_holds_decides() -> None:
    rules = [
        rule("never", when={"text": "zzz"}, thinking=True),
        rule("first", thinking=False),
        rule("second", thinking=True),
    ]
    assert deciding(rules, "hello") == ("first", None)


def test_priority_goes_before_order() -> None:
    rules = [
        rule("early", thinking=False),
        rule("late", thinking=True) | {"priority": 1},
        rule("last", thinking=True) | {"priority": -1},
    ]
    assert deciding(rules, "hello") == ("late", None)


def test_equal_priorities_keep_the_order_of_the_file() -> None:
    rules = [rule(name, thinking=True) | {"priority": 5} for name in ("b", "a", "c")]
    assert deciding(rules, "hello")[0] == "b"


def test_thinking_and_model_may_be_decided_by_different_rules() -> None:
    rules = [rule("thinks", thinking=True), rule("picks", model="coder"), rule("both", thinking=False, size="small")]
    assert deciding(rules, "hello") == ("thinks", "picks")
    decision = judged(talk("hello"), rules=rules, small_model="small")
    assert (decision.thinking, decision.thinking_source) == (True, "rule")
    assert (decision.model_id, decision.model_source) == ("coder", "rule")
    assert ("rule", "on: thinks") in verdicts(decision, "thinking")
    assert ("rule", "picks: coder") in verdicts(decision, "model")


def test_rule_that_names_both_decides_only_what_is_still_open() -> None:
    rules = [rule("model", model="coder"), rule("both", thinking=True, model="plain")]
    assert deciding(rules, "hello") == ("both", "model")


def test_rule_that_decides_not_to_think_is_a_decision_too() -> None:
    assert deciding([rule("off", thinking=False), rule("on", thinking=True)], "hello")[0] == "off"


def test_where_no_rule_holds_nobody_decides() -> None:
    assert deciding([rule("r", when={"text": "zzz"}, thinking=True)], "hello") == (None, None)
    assert deciding([], "hello") == (None, None)


def test_own_rules_go_before_the_shipped_ones() -> None:
    own = rule("mine", when={"task": "proof"}, thinking=False)
    decision = judged(talk("Prove that 7 is prime."), rules=[own], shipped_rules=True)
    assert (decision.thinking, decision.rule) == (False, "mine")


def test_shipped_rules_can_be_left_out() -> None:
    text = "Prove that 7 is prime."
    assert judged(talk(text), shipped_rules=True).rule == "proof"
    assert judged(talk(text), shipped_rules=False).rule is None


# What is refused, and where it says that the fault is

MODELS = [
    {"id": "hot", "aliases": ["nick"], "tier": "resident", "source": "o/h", "context": 4096},
    {"id": "embed", "tier": "lazy", "source": "o/e", "context": 512, "abilities": ["embeddings"]},
]


def complaint(**routing: Any) -> str:
    """What `parse_config` says about this `routing:`."""
    with pytest.raises(ConfigError) as error:
        parse_config({"models": MODELS, "routing": routing})
    return str(error.value)


def about_when(when: dict[str, Any]) -> str:
    return complaint(rules=[rule("good", thinking=True), {"name": "bad", "when": when, "then": THINK}])


@pytest.mark.parametrize(
    ("when", "path"),
    [
        ({"text": "("}, "text[0]"),
        ({"text": ["fine", "[z-a]"]}, "text[1]"),
        ({"text": ""}, "text[0]"),
        ({"not_text": ["fine", "fine", "*"]}, "not_text[2]"),
        ({"text": "(?=ahead)"}, "text[0]"),
        ({"text": "(?<!behind)x"}, "text[0]"),
        ({"text": r"(a)\1"}, "text[0]"),
        ({"text": "a{1001}"}, "text[0]"),
        ({"text": [r"\pL{900}" * 20]}, "text[0]"),
        ({"text": 7}, "text"),
        ({"task": "dance"}, "task[0]"),
        ({"not_task": ["math", "dance"]}, "not_task[1]"),
        ({"language": "fr"}, "language[0]"),
        ({"ask_tokens": {"min": -1}}, "ask_tokens.min"),
        ({"ask_tokens": {"min": 9, "max": 8}}, "ask_tokens.max"),
        ({"prompt_tokens": 100}, "prompt_tokens"),
        ({"turns": {"least": 1}}, "turns.least"),
        ({"tools": "often"}, "tools"),
        ({"key": "sk-secret"}, "key[0]"),
        ({"key": ["0" * 12, "0" * 13]}, "key[1]"),
        ({"header": {"x-tier": "("}}, "header.x-tier"),
        ({"header": {"X-Tier": "("}}, "header.X-Tier"),
        ({"header": {"x-tier": ""}}, "header.x-tier"),
        ({"header": {"authorization": "x"}}, "header.authorization"),
        ({"header": {"cookie": "x"}}, "header.cookie"),
        ({"header": {"x-api-key": "x"}}, "header.x-api-key"),
        ({"header": {"proxy-authorization": "x"}}, "header.proxy-authorization"),
        ({"header": {"Authorization": "x"}}, "header.Authorization"),
    ],
)
def test_bad_condition_is_refused_by_its_path(when: dict[str, Any], path: str) -> None:
    assert about_when(when).startswith(f"routing.rules[1].when.{path}: ")


@pytest.mark.parametrize("key", ["txt", "not", "min_tokens", "Text"])
def test_unknown_condition_is_refused_by_its_path(key: str) -> None:
    assert about_when({key: "x"}) == f"routing.rules[1].when.{key}: no such key"


def test_pattern_with_look_ahead_is_told_what_is_missing() -> None:
    assert "look-around" in about_when({"text": "(?=x)"})


def test_complaint_about_a_secret_header_names_the_way_out() -> None:
    assert "use `key`" in about_when({"header": {"authorization": "Bearer .*"}})


@pytest.mark.parametrize(
    "when",
    [{}, {"text": []}, {"text": [], "key": []}, {"header": {}}, {"tools": None}, {"ask_tokens": {}}, {"turns": {}}],
)
def test_rule_that_would_match_every_request_is_refused(when: dict[str, Any]) -> None:
    assert about_when(when).startswith("routing.rules[1].when")


@pytest.mark.parametrize(
    ("then", "path"),
    [
        ({}, "then"),
        ({"budget": 100}, "then"),
        ({"thinking": False, "budget": 100}, "then.budget"),
        ({"model": "hot", "budget": 100}, "then.budget"),
        ({"thinking": True, "budget": 0}, "then.budget"),
        ({"model": "hot", "size": "large"}, "then.size"),
        ({"size": "medium"}, "then.size"),
        ({"think": True}, "then.think"),
        ({"model": "nope"}, "then.model"),
        ({"model": "nick"}, "then.model"),
        ({"model": "embed"}, "then.model"),
    ],
)
def test_bad_outcome_is_refused_by_its_path(then: dict[str, Any], path: str) -> None:
    text = complaint(rules=[rule("good", thinking=True), {"name": "bad", "when": {"text": "x"}, "then": then}])
    assert text.startswith(f"routing.rules[1].{path}: ")


@pytest.mark.parametrize("name", ["", "two words", "-x", "x" * 65, "ü", "a\n"])
def test_rule_name_that_no_header_could_carry_is_refused(name: str) -> None:
    assert complaint(rules=[rule(name, thinking=True)]).startswith("routing.rules[0].name: ")


def test_name_of_two_rules_is_refused_at_the_second() -> None:
    text = complaint(rules=[rule("a", thinking=True), rule("b", thinking=True), rule("a", thinking=False)])
    assert text == "routing.rules[2].name: a is there twice"


@pytest.mark.parametrize("key", ["name", "when", "then"])
def test_rule_without_one_of_its_parts_is_refused(key: str) -> None:
    made = rule("r", thinking=True)
    del made[key]
    assert complaint(rules=[made]) == f"routing.rules[0].{key}: missing"


@pytest.mark.parametrize("small_model", ["nope", "embed", "nick"])
def test_small_model_must_be_a_chat_model(small_model: str) -> None:
    assert complaint(small_model=small_model).startswith("routing.small_model: ")


def test_several_bad_rules_are_all_named() -> None:
    bad = [rule(f"r{index}", when={"text": "("}, thinking=True) for index in range(3)]
    paths = [line.split(":")[0] for line in complaint(rules=bad).splitlines()]
    assert paths == [f"routing.rules[{index}].when.text[0]" for index in range(3)]


def test_one_value_may_stand_for_a_list() -> None:
    when = When.model_validate({"text": "a", "task": "math", "language": "zh", "model": "auto", "key": "0" * 12})
    assert when.text == ["a"]
    assert (when.task, when.language, when.model, when.key) == (["math"], ["zh"], ["auto"], ["0" * 12])


# Time


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "(a|aa)+$", "(.*)*x", "(a*)*b", r"^(\w+\s?)*$"])
def test_pattern_that_kills_backtracking_engines_is_fast_on_a_megabyte(pattern: str) -> None:
    parse_config({"models": MODELS, "routing": {"rules": [rule("r", when={"text": pattern}, thinking=True)]}})
    patterns = Patterns([pattern])
    text = "a" * 1_000_000 + "!"
    began = time.perf_counter()
    patterns.found(text)
    assert time.perf_counter() - began < 0.5


def test_header_pattern_is_linear_too() -> None:
    request = asked("x", **headers(x_tier="a" * 50_000 + "!"))
    began = time.perf_counter()
    assert not holds({"header": {"x-tier": "(a+)+$"}}, request)
    assert time.perf_counter() - began < 0.5


def test_no_text_keeps_the_shipped_rules_busy() -> None:
    rules = Rules(shipped_rules())
    draw = random.Random(1)
    seconds = []
    for _ in range(3):
        body = "".join(draw.choice(["show that ", "x", "show ", "that "]) for _ in range(2000))
        request = asked(body[:8000])
        began = time.perf_counter()
        rules.decisive(request)
        seconds.append(time.perf_counter() - began)
    # The event loop must not be blocked for 2 ms; this machine may be busy.
    assert min(seconds) < 0.005


def test_rules_that_are_accepted_can_be_used() -> None:
    # Each is within RE2's size; the set that they make is not.
    rules = [rule(f"r{index}", when={"text": rf"(?i)\b[\pL_]{{3,60}}q{index}\b"}, thinking=True) for index in range(20)]
    try:
        config = parse_config({"models": MODELS, "routing": {"rules": rules}})
    except ConfigError:
        return  # refused at start is right too
    assert Rules(config.routing.rules).decisive(asked("abcdefq7"))[0] == config.routing.rules[7]


# The rules that ship


def shipped(body: dict[str, Any] | str) -> tuple[str | None, str | None]:
    thinking, model = Rules(shipped_rules()).decisive(asked(body))
    return thinking and thinking.name, model and model.name


@pytest.mark.parametrize(
    "text",
    [
        "thanks",
        "Thank you so much!",
        "ok thanks",
        "Great, thanks a lot.",
        "perfect, that's all",
        "no thanks",
        "bye",
        "谢谢",
        "好的，谢谢老师！",
        "太好了，谢谢你",
        "明白了",
        "辛苦了，晚安",
        "謝謝",
    ],
)
def test_thanks_need_neither_thinking_nor_the_large_model(text: str) -> None:
    proof = "Prove that there are infinitely many primes."
    assert shipped(text) == ("thanks", "thanks")
    assert shipped(talk(proof, "Suppose there were finitely many …", text)) == ("thanks", "thanks")


@pytest.mark.parametrize(
    "text",
    [
        "thanks, now prove it for all n",
        "Thank you for applying. Write a rejection letter that sounds like that.",
        "谢谢，再帮我看看这段代码为什么死锁",
        "谢谢怎么用法语说",
        "thanksgiving",
        "ok",
        "好的",
    ],
)
def test_thanks_with_a_request_are_not_only_thanks(text: str) -> None:
    assert "thanks" not in shipped(text)


def test_thanks_in_an_agents_wrapping_are_thanks() -> None:
    details = "<environment_details>\n" + "src/main.py\n" * 200 + "</environment_details>"
    assert shipped(f"thanks\n{details}") == ("thanks", "thanks")


@pytest.mark.parametrize(
    "text",
    ["hi", "Hello there!", "hey, how are you doing today?", "Good morning.", "你好", "您好！", "在吗？", "晚上好"],
)
def test_greeting_needs_neither_thinking_nor_the_large_model(text: str) -> None:
    assert shipped(text) == ("greeting", "greeting")


@pytest.mark.parametrize(
    "text", ["hello world in rust", "Hi, why does this deadlock?", "你好，请证明根号二是无理数", "早上几点开门", "high"]
)
def test_greeting_with_a_request_is_not_only_a_greeting(text: str) -> None:
    assert "greeting" not in shipped(text)


@pytest.mark.parametrize(
    "text",
    [
        "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history.",
        "### Task:\nSuggest 3-5 relevant follow-up questions or prompts that the user might ask.",
        "Generate a short title for this conversation. Reply with the title only.",
        "### Task:\nGenerate 1-3 broad tags categorizing the main themes of the chat history."
        "\n<chat_history>\nuser: Prove that pi is irrational.\n</chat_history>",
        "为以下对话生成一个简短的标题，不超过十个字",
        "请给这段对话打上三个标签",
    ],
)
def test_housekeeping_of_a_front_end_needs_no_thinking(text: str) -> None:
    assert shipped(text) == ("housekeeping", "housekeeping")


@pytest.mark.parametrize(
    "text", ["What is the title of Kafka's longest novel?", "给这篇小说写个续集", "# Task 3: sort it"]
)
def test_talk_of_titles_is_no_housekeeping(text: str) -> None:
    assert "housekeeping" not in shipped(text)


@pytest.mark.parametrize(
    "text",
    [
        "Translate this into German: good morning",
        "please translate the following text to Chinese\n\nThe train is late.",
        "把这句话翻译成英文：早上好",
        "翻译成中文：The train is late.",
        "译成日语：谢谢",
    ],
)
def test_translation_needs_no_thinking_but_any_model(text: str) -> None:
    assert shipped(text) == ("translation", None)


@pytest.mark.parametrize(
    "text",
    [
        "Is machine translation solved?",
        "Why did they translate it so badly, and what follows for the plot?",
        "翻译这个职业有前途吗",
        "Prove that the translate of a measurable set is measurable.",
    ],
)
def test_talk_of_translation_is_none(text: str) -> None:
    assert "translation" not in shipped(text)


@pytest.mark.parametrize(
    "text",
    [
        "Prove that the square root of 2 is irrational.",
        "Please prove this: every bounded sequence has a convergent subsequence.",
        "Let G be a group of order p^2. Prove that G is abelian.",
        "Disprove: every continuous function is differentiable.",
        "Show that n^3 - n is divisible by 6 for all n.",
        "证明根号二是无理数",
        "请证明：任意六个人中必有三人互相认识或互不认识",
        "设 n 为正整数，求证：n^3-n 能被 6 整除",
        "已知 a>b>0。试证 a^2>b^2",
        "谢谢，再证明一下唯一性",
    ],
)
def test_proof_needs_thinking_and_the_large_model(text: str) -> None:
    assert set(shipped(text)) <= {"proof", "show-that"}


@pytest.mark.parametrize(
    "text",
    [
        "The proof of the pudding is in the eating. Who said that?",
        "prove your identity at the desk",
        "Translate into French: prove that you love me",
        "Summarize: the authors prove that every such graph is planar",
        "How do I show that banner for every visitor in React?",
        "Show that video for all kids in the class, what is it called?",
        "证明书怎么写",
        "在职证明怎么开",
        "开一份收入证明",
        "证件照怎么拍",
        "证据不足怎么办",
        "证监会是做什么的？",
        "证明材料需要哪些？",
        "证明文件丢了怎么办",
        "证婚词怎么写",
        "把“证明”翻译成英文",
    ],
)
def test_word_proof_alone_asks_for_none(text: str) -> None:
    assert "proof" not in shipped(text)


def test_proof_under_a_translators_system_prompt_is_material() -> None:
    messages = [
        {"role": "system", "content": "Translate what the user writes into French."},
        {"role": "user", "content": "Prove that the square root of 2 is irrational."},
    ]
    assert shipped({"messages": messages}) == (None, None)


def test_shipped_rules_fit_any_configuration() -> None:
    made = shipped_rules()
    assert len({entry.name for entry in made}) == len(made)
    assert all(-100 <= entry.priority <= -90 for entry in made)
    assert not any(entry.then.model for entry in made)


def test_policy_is_ready_before_the_first_request() -> None:
    config = parse_config({"models": MODELS})
    assert policy_of(catalog_of(config), config.routing).rules.decisive(asked("谢谢"))[0]
