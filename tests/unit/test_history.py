"""serve_app.conversations.history: what a request is given of what was said, and that turns stay whole."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.conversations.history import (
    Entry,
    Item,
    continues_nothing,
    entry_of,
    first_kept,
    is_readable,
    keeps_own_history,
    merge,
    split_system,
    tokens_of,
    turns_of,
)


def user(text: str) -> Item:
    return {"role": "user", "content": text}


def said(text: str) -> Item:
    return {"role": "assistant", "content": text}


def calls(*ids: str) -> Item:
    function = {"name": "f", "arguments": "{}"}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call, "type": "function", "function": function} for call in ids],
    }


def result(call: str) -> Item:
    return {"role": "tool", "tool_call_id": call, "content": f"of {call}"}


_counter = iter(range(10**9))


def entry(*items: Item) -> Entry:
    return entry_of(f"id{next(_counter)}", list(items))


def sized(*items: Item, tokens: int) -> Entry:
    made = entry(*items)
    return Entry(made.id, made.items, tokens, made.continues)


ONE = entry(user("one"), said("1"))
TWO = entry(user("two"), said("2"))
CALL = entry(user("weather?"), calls("a", "b"))
RESULTS = entry(result("a"), result("b"), said("sunny"))


def test_what_was_said_comes_before_what_is_asked() -> None:
    merged = merge([ONE, TWO], [user("three")])
    assert merged.items == [*ONE.items, *TWO.items, user("three")]
    assert (merged.turns, merged.dropped) == (2, 0)


def test_nothing_kept_leaves_the_request_as_it_is() -> None:
    assert merge([], [user("one")]).items == [user("one")]


def test_tool_results_follow_the_call_that_they_answer() -> None:
    asked = [result("a"), result("b")]
    assert merge([ONE, CALL], asked).items == [*ONE.items, *CALL.items, *asked]


def test_a_finished_tool_turn_is_replayed_whole() -> None:
    merged = merge([CALL, RESULTS], [user("thanks")])
    assert merged.items == [*CALL.items, *RESULTS.items, user("thanks")]
    assert merged.turns == 1


def test_a_turn_that_still_waits_for_its_tools_is_not_replayed_in_another() -> None:
    assert merge([ONE, CALL], [user("other")]).items == [*ONE.items, user("other")]


def test_a_turn_whose_tools_answered_only_in_part_is_not_replayed() -> None:
    half = entry(result("a"), said("b is missing"))
    assert merge([CALL, half], [user("other")]).items == [user("other")]


def test_a_turn_that_came_in_between_does_not_part_results_from_their_call() -> None:
    asked = [result("a"), result("b")]
    assert merge([CALL, TWO], asked).items == [*TWO.items, *CALL.items, *asked]
    assert merge([CALL, TWO, RESULTS], [user("x")]).items == [*TWO.items, *CALL.items, *RESULTS.items, user("x")]


def test_ids_that_an_engine_uses_again_belong_to_the_newest_open_call() -> None:
    first, again = entry(user("1"), calls("call_0")), entry(user("2"), calls("call_0"))
    done = entry(result("call_0"), said("done"))
    assert turns_of([first, done, again]) == [[first, done], [again]]
    assert merge([first, done, again], [result("call_0")]).items[-3:] == [*again.items, result("call_0")]


def test_several_rounds_of_tools_are_one_turn() -> None:
    second = entry(result("a"), result("b"), calls("c"))
    third = entry(result("c"), said("done"))
    assert turns_of([CALL, second, third]) == [[CALL, second, third]]


def test_results_without_their_call_are_left_out() -> None:
    assert turns_of([RESULTS, ONE]) == [[ONE]]
    assert continues_nothing([ONE], [result("a")])
    assert not continues_nothing([ONE, CALL], [result("a")])
    assert not continues_nothing([], [user("x")])


def test_items_of_the_responses_api_behave_the_same() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "a", "output": "sunny"}
    opened = entry({"type": "message", **user("weather?")}, call)
    assert merge([ONE, opened], [output]).items == [*ONE.items, *opened.items, output]
    assert merge([ONE, opened], [user("other")]).items == [*ONE.items, user("other")]
    assert entry(output, said("sunny")).continues


# Trimming


def test_the_oldest_turns_go_first_and_whole() -> None:
    turns = [sized(user(str(n)), said(str(n)), tokens=100) for n in range(5)]
    asked = [user("now")]
    merged = merge(turns, asked, 250 + tokens_of(asked))
    assert merged.items == [*turns[3].items, *turns[4].items, *asked]
    assert (merged.turns, merged.dropped) == (2, 3)


def test_a_tool_turn_goes_as_a_whole() -> None:
    call = sized(*CALL.items, tokens=100)
    results = sized(*RESULTS.items, tokens=100)
    assert merge([call, results, ONE], [user("now")], 150).items == [*ONE.items, user("now")]


def test_the_turn_that_is_gone_on_with_never_goes() -> None:
    call = sized(*CALL.items, tokens=10_000)
    merged = merge([ONE, call], [result("a"), result("b")], 10)
    assert merged.items == [*CALL.items, result("a"), result("b")]
    assert merged.dropped == 1


def test_no_older_turn_is_kept_where_a_newer_had_no_room() -> None:
    small, large = sized(user("s"), said("s"), tokens=1), sized(user("l"), said("l"), tokens=1000)
    assert merge([small, large], [user("now")], 100).items == [user("now")]


sizes = st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=12)


@given(sizes, st.integers(0, 200))
def test_first_kept_is_a_turns_beginning_and_as_old_as_fits(entries: list[tuple[int, bool]], limit: int) -> None:
    first = first_kept(entries, limit)
    beginnings = [index for index, (_, continues) in enumerate(entries) if not continues]
    if not beginnings:
        assert first == 0
        return
    assert first in beginnings
    fitting = [index for index in beginnings if sum(tokens for tokens, _ in entries[index:]) <= limit]
    assert first == min(fitting, default=beginnings[-1])


@st.composite
def conversations(draw: st.DrawFn) -> list[Entry]:
    """Entries as requests that ran at once may have left them: calls, answers in any order, turns in between."""
    entries: list[Entry] = []
    waiting: list[str] = []
    for number in range(draw(st.integers(0, 10))):
        tokens = draw(st.integers(1, 60))
        if waiting and draw(st.booleans()):
            call = waiting.pop(draw(st.integers(0, len(waiting) - 1)))
            entries.append(sized(result(call), said(f"{number}"), tokens=tokens))
        elif draw(st.booleans()):
            waiting.append(f"c{number}")
            entries.append(sized(user(f"{number}"), calls(f"c{number}"), tokens=tokens))
        else:
            entries.append(sized(user(f"{number}"), said(f"{number}"), tokens=tokens))
    return entries[draw(st.integers(0, 3)) :]


@given(conversations(), st.none() | st.integers(0, 300))
def test_whatever_was_kept_every_call_is_followed_by_its_answer_and_every_answer_has_its_call(
    entries: list[Entry], limit: int | None
) -> None:
    merged = merge(entries, [user("now")], limit)
    waiting: list[str] = []
    for item in merged.items:
        if item["role"] == "tool":
            waiting.remove(item["tool_call_id"])
        else:
            assert not waiting, "something came between a call and its answer"
            waiting += [call["id"] for call in item.get("tool_calls", ())]
    assert not waiting
    assert merged.items[-1] == user("now")


@given(conversations(), st.integers(0, 300))
def test_the_limit_holds_and_nothing_that_fits_is_dropped(entries: list[Entry], limit: int) -> None:
    asked = [user("now")]
    room = limit - tokens_of(asked)
    whole, merged = merge(entries, asked), merge(entries, asked, limit)
    turns = [turn for turn in turns_of(entries) if all(item in whole.items for part in turn for item in part.items)]
    kept = turns[merged.dropped :]
    assert sum(part.tokens for turn in kept for part in turn) <= max(room, 0)
    assert merged.items == [*(item for turn in kept for part in turn for item in part.items), *asked]
    if merged.dropped:
        assert sum(part.tokens for turn in turns[merged.dropped - 1 :] for part in turn) > room


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.lists(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), json_values), max_size=4)
)
def test_an_entry_survives_its_encoding(items: list[Item]) -> None:
    made = entry(*items)
    assert Entry.decode(made.encode()) == made
    assert Entry.label(made.encode()) == (made.tokens, made.continues, made.id)


@pytest.mark.parametrize("raw", [b"", b"1:0:x", b"x:0:y:[]", b"1:0:y:{"])
def test_what_is_no_entry_is_a_value_error(raw: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 any will do
        Entry.decode(raw)


def test_an_image_weighs_by_its_bytes() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 640_000}}
    assert entry({"role": "user", "content": [image]}).tokens >= 10_000


# Who keeps the history


@pytest.mark.parametrize(
    ("messages", "own"),
    [
        ([user("hi")], False),
        ([{"role": "system", "content": "s"}, user("hi")], False),
        ([result("a"), result("b")], False),
        ([user("hi"), said("ho"), user("on")], True),
        ([user("hi"), user("there")], True),
        ([calls("a"), result("a")], True),
        ([user("hi"), said("begun ")], True),
    ],
)
def test_a_client_that_sends_more_than_a_turn_keeps_its_own_history(messages: list[Item], own: bool) -> None:
    assert keeps_own_history(messages) is own


@pytest.mark.parametrize("messages", [None, [], "hi", [1], [{}], [{"role": 1}], [user("hi"), None]])
def test_what_is_no_messages_is_left_to_who_checks_bodies(messages: object) -> None:
    assert not is_readable(messages)


def test_system_messages_stand_apart() -> None:
    system, developer = {"role": "system", "content": "s"}, {"role": "developer", "content": "d"}
    assert split_system([system, user("hi"), developer]) == ([system, developer], [user("hi")])
