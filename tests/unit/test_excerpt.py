"""serve_app.routing.excerpt: what the last turn asks and in which setting, for any messages."""

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.errors import ApiError
from serve_app.routing.excerpt import Excerpt, clipped, has_image, language_of, read_excerpt, text_of, tokens_in
from serve_app.routing.facts import read_facts

REMINDER = "<system-reminder>\nThe todo list is empty. Prove that you read it.\n</system-reminder>"


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def excerpt(*messages: dict[str, Any] | str, tools: Any = ()) -> Excerpt:
    """The excerpt of messages; a text alone is the user's."""
    return read_excerpt([user(message) if isinstance(message, str) else message for message in messages], tools)


# The ask and what came before it


def test_ask_is_the_last_user_message() -> None:
    assert excerpt("first", said("assistant", "answer"), "second").ask == "second"


def test_ask_survives_messages_of_others_after_it() -> None:
    found = excerpt("look it up", said("assistant", None, tool_calls=[{}]), said("tool", "42"))
    assert found.ask == "look it up"


def test_text_parts_are_joined_and_others_are_left_out() -> None:
    parts = [{"type": "text", "text": "what is"}, {"type": "image_url", "image_url": {}}, {"text": "this?"}]
    assert excerpt(user(parts)).ask == "what is\nthis?"


def test_before_and_reply_are_the_last_texts_before_the_ask() -> None:
    found = excerpt("one", said("assistant", "re one"), "two", said("assistant", "re two"), "three")
    assert (found.before, found.reply, found.ask) == ("two", "re two", "three")


def test_reply_is_the_last_assistant_message_that_has_text() -> None:
    call = said("assistant", None, tool_calls=[{}])
    found = excerpt("one", said("assistant", "a plan"), call, said("tool", "42"), "go ahead")
    assert found.reply == "a plan"


def test_first_turn_has_nothing_before_it() -> None:
    found = excerpt(said("system", "be kind"), "hello")
    assert (found.before, found.reply, found.turns) == ("", "", 1)


def test_turns_are_the_user_messages() -> None:
    assert excerpt("one", said("assistant", "x"), "two", said("assistant", "y"), "three").turns == 3


def test_system_and_developer_prompts_are_read_together() -> None:
    found = excerpt(said("system", "be kind"), said("developer", [{"type": "text", "text": "be brief"}]), "hello")
    assert found.system == "be kind be brief"


def test_chat_without_a_user_message_asks_nothing() -> None:
    found = excerpt(said("system", "be kind"), said("assistant", "hello"))
    assert (found.ask, found.instruction, found.ask_tokens, found.turns) == ("", "", 0, 0)


def test_answer_that_the_client_began_is_seen() -> None:
    assert excerpt("write a haiku", said("assistant", "The old pond")).prefilled
    assert not excerpt("write a haiku").prefilled


# Harness blocks


@pytest.mark.parametrize(
    "tag",
    [
        "system-reminder",
        "environment_details",
        "environment_context",
        "user_instructions",
        "additional_data",
        "user_info",
        "chat_history",
        "context",
        "attached_files",
    ],
)
def test_block_that_a_harness_put_in_is_not_asked(tag: str) -> None:
    block = f"<{tag}>\nProve that 2 is prime.\n</{tag}>"
    assert excerpt(f"{block}\nthanks\n{block}").ask == "thanks"


def test_block_with_attributes_is_not_asked_either() -> None:
    assert excerpt('<context source="wiki">facts</context> who wrote it?').ask == "who wrote it?"


def test_message_of_nothing_but_blocks_is_kept() -> None:
    assert excerpt(REMINDER).ask == REMINDER


def test_block_that_is_not_closed_is_kept() -> None:
    assert excerpt("<context> why does </b> not close it?").ask == "<context> why does </b> not close it?"


def test_tag_that_only_begins_like_a_harness_tag_is_the_users_own() -> None:
    text = "Why does <contextmenu> not open?\n<context>menu.html</context>"
    assert excerpt(text).ask == "Why does <contextmenu> not open?"


def test_block_longer_than_the_clip_is_not_asked() -> None:
    files = "<attached_files>" + "x = 1\n" * 2000 + "</attached_files>"
    details = "<environment_details>" + "a.py\n" * 2000 + "</environment_details>"
    assert excerpt(f"{files}\n{details}\nthanks").ask == "thanks"


def test_tokens_of_the_ask_do_not_count_what_a_harness_put_in() -> None:
    assert excerpt(f"thanks\n{REMINDER}").ask_tokens == excerpt("thanks").ask_tokens


def test_blocks_are_left_out_of_what_came_before_too() -> None:
    assert excerpt(f"{REMINDER} sort it", said("assistant", "done"), "thanks").before == "sort it"


# Clipping


def test_short_text_is_not_clipped() -> None:
    assert clipped("abcdefgh", 3) == "abcdefgh"


def test_long_text_keeps_its_beginning_and_its_end() -> None:
    assert clipped("abc" + "-" * 100 + "xyz", 3) == "abc\n\nxyz"


@pytest.mark.parametrize("text", ["a" * 1_000_000, "字" * 300_000])
def test_excerpt_of_a_huge_message_is_small(text: str) -> None:
    found = excerpt(said("system", text), text, said("assistant", text), f"Summarize.\n{text}\nBe brief.")
    assert found.ask.startswith("Summarize.\n")
    assert found.ask.endswith("\nBe brief.")
    assert (len(found.ask), len(found.instruction)) == (4002, 702)
    assert max(map(len, (found.before, found.reply, found.system))) <= 1202


def test_instruction_holds_both_ends_of_the_ask() -> None:
    found = excerpt("Translate this:\n" + "material " * 500 + "\nKeep the tone.")
    assert found.instruction.startswith("Translate this:")
    assert found.instruction.endswith("Keep the tone.")


# Language


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Prove that 2 is prime.", "en"),
        ("Was ist das?", "en"),
        ("", "en"),
        ("12 + 30 = ?", "en"),
        ("证明根号二是无理数", "zh"),
        ("帮我写一个 bug 报告，谢谢", "zh"),
        ("請問這個怎麼做？", "zh"),
        ("解释 gradient descent 的 learning rate", "mixed"),
        ("请 review 一下 this pull request 然后 merge", "mixed"),
    ],
)
def test_language_of_a_text(text: str, language: str) -> None:
    assert language_of(text) == language
    assert excerpt(text).language == language


def test_language_is_the_asks_not_the_system_prompts() -> None:
    assert excerpt(said("system", "你是一个有用的助手，请认真回答。"), "What is a monad?").language == "en"


# Tokens

ENGLISH = "The committee could not agree on a date, so the chair wrote to each member and asked for two proposals. "
CHINESE = "委员会没能就日期达成一致，于是主席给每位委员写信，请他们各提出两个备选的时间，再由秘书汇总。"


# The numbers are Qwen3's own tokenizer's.
@pytest.mark.parametrize(("text", "tokens"), [(ENGLISH, 23), (CHINESE, 28)])
def test_tokens_of_prose_are_estimated_within_a_half(text: str, tokens: int) -> None:
    assert tokens / 1.5 <= tokens_in(text) <= tokens * 1.5


@pytest.mark.parametrize("text", [ENGLISH, CHINESE, ENGLISH + CHINESE, "😀🎉" * 20, "Привет, мир. " * 10])
def test_estimate_grows_with_the_text(text: str) -> None:
    assert 0 < tokens_in(text) <= 2 * len(text)
    assert tokens_in(text * 10) == pytest.approx(10 * tokens_in(text), rel=0.1)


def test_empty_text_has_no_tokens() -> None:
    assert tokens_in("") == 0


def test_prompt_is_larger_than_the_ask_by_all_that_stands_around_it() -> None:
    alone = excerpt(ENGLISH)
    assert alone.ask_tokens <= alone.prompt_tokens <= alone.ask_tokens + 10
    assert excerpt(said("system", ENGLISH * 10), ENGLISH).prompt_tokens > 10 * alone.ask_tokens
    calls = said("assistant", None, tool_calls=[{"function": {"arguments": ENGLISH * 10}}])
    assert excerpt(ENGLISH, calls, said("tool", "42")).prompt_tokens > 10 * alone.ask_tokens


def test_tools_count_for_the_prompt() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": ENGLISH * 10}}
    assert excerpt("hi", tools=[tool]).prompt_tokens > excerpt("hi").prompt_tokens + 10 * 15


# Tools and images


@pytest.mark.parametrize("role", ["tool", "function"])
def test_tool_loop_is_a_chat_that_ends_with_a_result(role: str) -> None:
    found = excerpt("look it up", said("assistant", None, tool_calls=[{}]), said(role, "42"))
    assert found.in_tool_loop


def test_question_after_a_result_is_no_tool_loop() -> None:
    found = excerpt("look it up", said("assistant", None), said("tool", "42"), said("assistant", "42"), "and now?")
    assert not found.in_tool_loop


def test_tools_are_known_by_their_names() -> None:
    found = excerpt("hi", tools=[{"type": "function", "function": {"name": name}} for name in ("read", "write")])
    assert (found.tools, found.tool_names) == (True, ("read", "write"))
    assert (excerpt("hi").tools, excerpt("hi").tool_names) == (False, ())


@pytest.mark.parametrize("kind", ["image_url", "input_image", "image"])
def test_image_anywhere_in_the_chat_is_seen(kind: str) -> None:
    assert excerpt(user([{"type": "text", "text": "what is this"}, {"type": kind}])).images
    assert excerpt(user([{"type": kind}]), said("assistant", "a cat"), "which breed?").images


def test_text_about_images_is_no_image() -> None:
    assert not excerpt('look: {"type": "image_url"}').images
    assert not has_image(user("image_url"))


# Odd shapes

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "function", "name", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "developer", "tool", "function", "", "odd"])},
        optional={"content": JSON, "tool_calls": JSON, "name": JSON},
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=400, deadline=None, database=None)
@given(MESSAGES, st.lists(JSON, max_size=3))
def test_messages_that_pass_the_check_are_always_read(messages: list[dict[str, Any]], tools: list[Any]) -> None:
    try:
        body = read_facts({"messages": messages, "tools": tools}, "chat").body
    except ApiError:
        return
    found = read_excerpt(body["messages"], body["tools"])
    assert found.prompt_tokens >= found.ask_tokens
    assert all(found.tool_names)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ([], ""),
        (7, ""),
        ({"text": "x"}, ""),
        ([None, "bare", 1, [], {"text": None}, {"text": ["x"]}, {}, {"text": "seen"}], "seen"),
    ],
)
def test_text_of_odd_content_is_what_is_certainly_text(content: Any, text: str) -> None:
    assert text_of(content) == text


def test_half_a_surrogate_is_read() -> None:
    assert excerpt("broken \ud83d text").ask_tokens > 0


def test_long_tool_names_are_cut() -> None:
    assert excerpt("hi", tools=[{"function": {"name": "n" * 5000}}]).tool_names == ("n" * 64,)


@pytest.mark.parametrize("field", ["tools", "tool_calls"])
def test_nesting_as_deep_as_the_parser_takes_is_read(field: str) -> None:
    # orjson reads 1024 levels.
    deep = orjson.loads(b"[" * 1010 + b"]" * 1010)
    if field == "tools":
        assert excerpt("hello", tools=[deep]).ask == "hello"
    else:
        assert excerpt(said("assistant", None, tool_calls=[deep]), "hello").ask == "hello"
