"""A prompt goes where its beginning is, unless that replica is much busier."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve_app.admission.affinity import CHARS_A_REQUEST, MAX_STEPS, STEP_CHARS, Prefixes, cost_of, steps_of

SYSTEM = "You are a careful assistant. " * 200
texts = st.lists(st.text(max_size=3000), max_size=6)


@given(texts, texts)
def test_longer_prompt_has_all_marks_of_its_beginning(begins: list[str], goes_on: list[str]) -> None:
    short, long = steps_of("m", begins), steps_of("m", [*begins, *goes_on])
    assert long[: len(short)] == short
    assert len(long) == min(MAX_STEPS, (sum(map(len, begins + goes_on)) + len(begins + goes_on)) // STEP_CHARS)


def test_prompts_that_differ_early_share_no_mark() -> None:
    assert not set(steps_of("m", ["a" + SYSTEM])) & set(steps_of("m", ["b" + SYSTEM]))
    assert not set(steps_of("m", [SYSTEM])) & set(steps_of("other", [SYSTEM]))


def test_replica_knows_what_it_was_sent_and_no_more() -> None:
    prefixes = Prefixes()
    first = steps_of("m", [SYSTEM, "first question " * 200])
    second = steps_of("m", [SYSTEM, "another one " * 200])
    prefixes.sent("a", first)
    shared = len(SYSTEM) // STEP_CHARS * STEP_CHARS
    assert prefixes.known("a", first) == len(first) * STEP_CHARS
    assert prefixes.known("a", second) == shared
    assert prefixes.known("b", first) == 0


def test_memory_is_bounded_and_forgets_the_ends_first() -> None:
    prefixes = Prefixes(size=6)
    steps = steps_of("m", ["x" * 4 * STEP_CHARS])
    prefixes.sent("a", steps)
    prefixes.sent("b", steps)
    assert prefixes.known("b", steps) == len(steps) * STEP_CHARS
    assert prefixes.known("a", steps) == (6 - len(steps)) * STEP_CHARS


def test_prefix_outweighs_a_request_more_and_not_many() -> None:
    known = 2 * CHARS_A_REQUEST
    assert cost_of(1, known, 0) < cost_of(0, 0, 0)
    assert cost_of(3, known, 0) > cost_of(0, 0, 0)


def test_what_all_conversations_share_draws_none_of_them_to_a_busier_replica() -> None:
    prefixes = Prefixes()
    talks = [steps_of("m", [SYSTEM, f"{number} " * 2000]) for number in range(3)]
    system = steps_of("m", [SYSTEM])
    assert prefixes.shared(talks[0]) == 0
    prefixes.sent("a", talks[0])
    assert prefixes.shared(talks[0]) == 0
    prefixes.sent("a", talks[1])
    for talk in talks:
        assert prefixes.shared(talk) == len(system) * STEP_CHARS

    def cost(replica: str, in_flight: int, talk: tuple[int, ...]) -> tuple[int, int]:
        return cost_of(in_flight, prefixes.known(replica, talk), prefixes.shared(talk))

    # A new conversation goes where less is going on, and where that is equal, to whom has the system prompt.
    assert cost("b", 0, talks[2]) < cost("a", 1, talks[2])
    assert cost("a", 0, talks[2]) < cost("b", 0, talks[2])
    # One that has begun stays where it is.
    longer = steps_of("m", [SYSTEM, "0 " * 2000, "and so on " * 1000])
    prefixes.sent("a", longer)
    assert cost("a", 1, longer) < cost("b", 0, longer)


def test_conversation_that_grows_shares_nothing() -> None:
    prefixes = Prefixes()
    talk = [SYSTEM]
    for turn in range(10):
        talk.append(f"turn {turn} " * 100)
        prefixes.sent("a", steps_of("m", talk))
        assert prefixes.shared(steps_of("m", talk)) == 0
