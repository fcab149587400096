"""serve_app.telemetry.decisions: decisions are counted by what and why, and handed on in one go."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from judging import judged, rule, score, talk

from serve_app.telemetry import decisions
from serve_app.telemetry.decisions import LABELS, DecisionCounts, no_meter


class Metered:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[tuple[dict[str, str], int]] = []
        self.called = asyncio.Event()

    def __call__(self, labels: Mapping[str, str], number: int) -> None:
        self.given.append((dict(labels), number))
        self.called.set()


def labels(*bodies: dict[str, Any], **setting: Any) -> list[tuple[dict[str, str], int]]:
    """What is handed on for these bodies."""
    meter = Metered()

    async def count() -> None:
        counts = DecisionCounts(meter)
        for body in bodies:
            counts.count(judged(body, **setting))
        counts.flush()

    asyncio.run(count())
    return meter.given


def test_decision_is_counted_by_both_choices_and_their_sources() -> None:
    ((found, number),) = labels(talk("hello"), score=score(0.9), small_model="small")
    assert number == 1
    assert found == {
        "model": "large",
        "model_source": "scorer",
        "thinking": "on",
        "thinking_source": "scorer",
        "rule": "",
        "scorer": "test",
    }
    assert tuple(found) == LABELS


def test_rule_is_named() -> None:
    ((found, _),) = labels(talk("hello"), rules=[rule("off", thinking=False)])
    assert (found["rule"], found["thinking"], found["thinking_source"]) == ("off", "off", "rule")


def test_like_decisions_are_added_up() -> None:
    found = labels(talk("hello"), talk("hallo"), talk("hello", mode="thinking"), score=score(0.1))
    assert sorted((entry["thinking_source"], number) for entry, number in found) == [("mode", 1), ("scorer", 2)]


def test_nothing_of_the_request_becomes_a_label() -> None:
    found = labels(talk("patient-4711 e", user="patient-4711"), rules=[rule(thinking=True)], shipped_rules=True)
    assert "patient" not in str(found)


async def test_meter_is_not_called_while_a_request_waits() -> None:
    meter = Metered()
    counts = DecisionCounts(meter)
    counts.count(judged(talk("hello")))
    assert meter.given == []
    counts.flush()
    assert [number for _, number in meter.given] == [1]


async def test_what_was_handed_on_is_not_handed_on_again() -> None:
    meter = Metered()
    counts = DecisionCounts(meter)
    counts.count(judged(talk("hello")))
    counts.flush()
    counts.flush()
    assert len(meter.given) == 1


async def test_counts_are_handed_on_without_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "FLUSH_EVERY_S", 0)
    meter = Metered()
    counts = DecisionCounts(meter)
    for number in (1, 2):
        counts.count(judged(talk("hello")))
        async with asyncio.timeout(5):
            await meter.called.wait()
        meter.called.clear()
        assert sum(count for _, count in meter.given) == number


async def test_decisions_can_be_counted_for_nobody() -> None:
    counts = DecisionCounts(no_meter)
    counts.count(judged(talk("hello")))
    counts.flush()
