"""Who goes in next and who has to go: the queue of one model, driven by hand and by random days."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.admission.queue import FairQueue, Ticket

LATER = 1000.0


def filled(queue: FairQueue, *requests: tuple[str, int]) -> list[Ticket]:
    return [queue.join(key, priority, LATER)[0] for key, priority in requests]


def order(queue: FairQueue, places: int = 1) -> list[str]:
    """The keys in the order in which they go in, with so many places; who came in first is done first."""
    inside: list[str] = []
    seen = []
    while ticket := queue.next():
        if len(inside) == places:
            queue.ended(inside.pop(0))
        queue.started(ticket.key)
        inside.append(ticket.key)
        seen.append(ticket.key)
    return seen


def test_first_come_is_first_served_within_a_key() -> None:
    queue = FairQueue(5)
    tickets = filled(queue, *[("a", 0)] * 5)
    assert [queue.next() for _ in range(5)] == tickets
    assert queue.next() is None


def test_a_thousand_requests_of_one_key_delay_another_key_by_one() -> None:
    queue = FairQueue(2000)
    queue.started("flood")
    filled(queue, *[("flood", 0)] * 1000, ("small", 0))
    queue.ended("flood")
    first = queue.next()
    assert first
    assert first.key == "small"


@pytest.mark.parametrize("places", [1, 2, 3])
def test_more_keys_than_places_starve_nobody(places: int) -> None:
    queue = FairQueue(5000)
    filled(queue, *[("flood", 0)] * 1000, *[("other", 0)] * 1000, ("small", 0))
    assert order(queue, places).index("small") <= 2


def test_key_that_comes_back_at_once_shares_the_places_with_the_flood() -> None:
    queue = FairQueue(2000)
    filled(queue, *[("flood", 0)] * 200)
    served: Counter[str] = Counter()
    inside: list[str] = []
    for _ in range(100):
        if not any(ticket.key == "steady" for ticket in queue._waiting.values()):
            filled(queue, ("steady", 0))
        if len(inside) == 4:
            queue.ended(inside.pop(0))
        ticket = queue.next()
        assert ticket
        queue.started(ticket.key)
        inside.append(ticket.key)
        served[ticket.key] += 1
    assert served["steady"] >= 48


def test_higher_priority_goes_first_whatever_came_before() -> None:
    queue = FairQueue(10)
    filled(queue, ("a", 0), ("b", -5), ("c", 5), ("d", 0), ("e", 5))
    assert order(queue, places=9) == ["c", "e", "a", "d", "b"]


def test_full_queue_refuses_the_newcomer_that_is_no_more_important() -> None:
    queue = FairQueue(2)
    filled(queue, ("a", 0), ("b", 0))
    ticket, loser = queue.join("c", 0, LATER)
    assert loser == ticket
    assert ticket not in (queue.next(), queue.next())
    assert queue.next() is None


def test_more_important_newcomer_displaces_the_newest_of_the_least_important() -> None:
    queue = FairQueue(3)
    old, important, new = filled(queue, ("a", 0), ("b", 3), ("c", 0))
    _, loser = queue.join("d", 1, LATER)
    assert loser == new
    assert {ticket and ticket.number for ticket in (queue.next(), queue.next())} == {important.number, 4}
    assert queue.next() == old


def test_key_that_holds_most_of_the_queue_gives_way_to_a_small_one() -> None:
    queue = FairQueue(3)
    *_, newest = filled(queue, *[("flood", 0)] * 3)
    ticket, loser = queue.join("small", 0, LATER)
    assert loser == newest
    assert ticket in [queue.next() for _ in range(3)]


def test_queue_of_no_size_refuses_everybody() -> None:
    queue = FairQueue(0)
    ticket, loser = queue.join("a", 9, LATER)
    assert (loser, len(queue)) == (ticket, 0)


def test_place_is_how_many_go_in_before_it_would() -> None:
    queue = FairQueue(9)
    queue.started("a")
    first, other, second, urgent = filled(queue, ("a", 0), ("b", 0), ("a", 0), ("a", 1))
    assert [queue.place(ticket) for ticket in (urgent, other, first, second)] == [1, 2, 3, 4]
    assert queue.next() == urgent
    assert [queue.place(ticket) for ticket in (urgent, other, first, second)] == [1, 1, 2, 3]


def test_request_that_found_no_place_after_all_keeps_its_own() -> None:
    queue = FairQueue(5)
    first, *_ = filled(queue, ("a", 0), ("b", 0), ("c", 0))
    assert queue.next() == first
    queue.rejoin(first)
    assert order(queue, places=9) == ["a", "b", "c"]


def test_who_waited_too_long_is_out_and_the_others_stay() -> None:
    queue = FairQueue(5)
    late, _ = queue.join("a", 0, 10.0)
    fresh, _ = queue.join("b", 0, 10.5)
    assert queue.overdue(9.99) == []
    assert queue.overdue(10.0) == [late]
    assert [queue.next(), queue.next()] == [fresh, None]


def test_who_leaves_is_out_and_leaving_twice_does_no_harm() -> None:
    queue = FairQueue(5)
    first, second = filled(queue, ("a", 0), ("b", 0))
    for _ in range(2):
        queue.leave(first)
    assert [queue.next(), queue.next()] == [second, None]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.sampled_from("abc"), st.integers(-1, 1)),
        st.tuples(st.sampled_from(["next", "end", "leave", "rejoin", "overdue"]), st.integers(0, 9), st.just(0)),
    ),
    max_size=80,
)


@given(size=st.integers(0, 6), steps=STEPS)
def test_nobody_is_lost_or_served_twice_and_the_size_is_never_exceeded(
    size: int, steps: list[tuple[str, str | int, int]]
) -> None:
    queue = FairQueue(size)
    now = 0.0
    waiting: dict[int, Ticket] = {}
    inside: list[Ticket] = []
    for what, argument, priority in steps:
        now += 1
        if what == "join":
            ticket, loser = queue.join(str(argument), priority, now + 20)
            waiting[ticket.number] = ticket
            if loser:
                assert len(waiting) > size
                assert waiting.pop(loser.number) == loser
                assert all(loser.priority <= other.priority for other in waiting.values())
        elif what == "next":
            going = queue.next()
            assert (going is None) == (not waiting)
            if going:
                assert going.priority == max(ticket.priority for ticket in waiting.values())
                del waiting[going.number]
                queue.started(going.key)
                inside.append(going)
        elif what == "end" and inside:
            queue.ended(inside.pop(0).key)
        elif what == "leave" and waiting:
            queue.leave(waiting.pop(sorted(waiting)[int(argument) % len(waiting)]))
        elif what == "rejoin" and inside and len(waiting) < size:
            again = inside.pop()
            queue.withdrew(again.key)
            queue.rejoin(again)
            waiting[again.number] = again
        elif what == "overdue":
            for ticket in queue.overdue(now):
                assert ticket.until <= now
                del waiting[ticket.number]
        assert len(queue) == len(waiting) <= size
        for key in "abc":
            assert queue.in_flight(key) == sum(ticket.key == key for ticket in inside)
    left = set(waiting)
    while ticket := queue.next():
        left.remove(ticket.number)
    assert not left


@given(
    flood=st.integers(1, 60),
    places=st.integers(1, 8),
    others=st.lists(st.sampled_from("bcd"), max_size=10),
)
def test_a_key_waits_for_at_most_one_request_of_every_other_key(flood: int, places: int, others: list[str]) -> None:
    queue = FairQueue(1000)
    filled(queue, *[("flood", 0)] * flood, *[(key, 0) for key in others], ("me", 0))
    assert order(queue, places).index("me") <= 1 + len(set(others))
