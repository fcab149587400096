"""serve_app.scoring.guard: a scorer costs a request its deadline at most, and a broken one is left alone."""

import asyncio
from typing import Any

import pytest
from judging import score, talk

from serve_app.routing.excerpt import Excerpt, read_excerpt
from serve_app.routing.lexical import Score
from serve_app.routing_schema import Scorer as Settings
from serve_app.scoring.guard import Guarded, NotReady


class Scripted:
    """A scorer that does what its script says next: a score to answer, an error to raise, None to never answer."""

    def __init__(self, *script: Score | Exception | None) -> None:
        self.script = list(script)
        self.asked: list[str] = []
        self.started = self.closed = 0
        self.waits = asyncio.Event()

    async def start(self) -> None:
        self.started += 1

    async def close(self) -> None:
        self.closed += 1

    async def score(self, excerpt: Excerpt, body: dict[str, Any]) -> Score:
        self.asked.append(excerpt.ask)
        step = self.script.pop(0) if self.script else score(0.9)
        if step is None:
            self.waits.set()
            await asyncio.Event().wait()
        if isinstance(step, Exception):
            raise step
        assert step
        return step


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def guarded(scorer: Scripted, clock: Clock | None = None, **settings: Any) -> Guarded:
    return Guarded(scorer, Settings.model_validate({"deadline_ms": 5, **settings}), clock or Clock())


async def ask(guard: Guarded, *texts: str, tools: Any = ()) -> Score | None:
    """The guarded score of a conversation."""
    body = talk(*(texts or ("hello",)))
    return await guard.score(read_excerpt(body["messages"], tools), body)


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


async def test_score_in_time_is_passed_on() -> None:
    assert await ask(guarded(Scripted(score(0.7)))) == score(0.7)


async def test_late_scorer_costs_no_more_than_its_deadline() -> None:
    guard = guarded(Scripted(None))
    async with asyncio.timeout(2):
        assert await ask(guard) is None
    assert (guard.late, guard.failed) == (1, 0)


@pytest.mark.parametrize("error", [RuntimeError("died"), KeyError("x"), OSError(), ValueError("patient-4711")])
async def test_failure_of_the_scorer_is_no_score(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    guard = guarded(Scripted(error), breaker_failures=1)
    assert await ask(guard) is None
    assert (guard.late, guard.failed) == (0, 1)
    assert "patient" not in caplog.text


async def test_request_that_is_given_up_stays_given_up() -> None:
    scorer = Scripted(None)
    guard = guarded(scorer, deadline_ms=60_000)
    asking = asyncio.create_task(ask(guard))
    await scorer.waits.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (guard.late, guard.failed) == (0, 0)


@pytest.mark.parametrize(("kind", "deadline_s"), [("lexical", 0.04), ("embedding", 0.04), ("self", 1.5)])
def test_deadline_of_each_kind(kind: str, deadline_s: float) -> None:
    assert Settings.model_validate({"kind": kind}).deadline_s == deadline_s
    assert Settings.model_validate({"kind": kind, "deadline_ms": 70}).deadline_s == pytest.approx(0.07)


# Memory


async def test_same_question_is_asked_once() -> None:
    scorer = Scripted(score(0.7))
    guard = guarded(scorer)
    assert [await ask(guard), await ask(guard)] == [score(0.7)] * 2
    assert (len(scorer.asked), guard.cached) == (1, 1)


async def test_what_came_before_makes_it_another_question() -> None:
    scorer = Scripted()
    guard = guarded(scorer)
    await ask(guard, "go ahead")
    await ask(guard, "sort it", "done", "go ahead")
    await ask(guard, "prove it", "done", "go ahead")
    await ask(guard, "prove it", "plan", "go ahead")
    await ask(guard, "go ahead", tools=[tool("run")])
    await ask(guard, "go ahead", tools=[tool("read")])
    assert (len(scorer.asked), guard.cached) == (6, 0)


async def test_least_recently_used_answer_is_forgotten_first() -> None:
    scorer = Scripted()
    guard = guarded(scorer, cache_entries=2)
    for text in ("a", "b", "a", "c", "a", "b"):
        await ask(guard, text)
    assert scorer.asked == ["a", "b", "c", "b"]


async def test_without_a_cache_every_question_is_asked() -> None:
    scorer = Scripted()
    guard = guarded(scorer, cache_entries=0)
    await ask(guard)
    await ask(guard)
    assert len(scorer.asked) == 2


async def test_failure_is_not_remembered() -> None:
    guard = guarded(Scripted(RuntimeError(), score(0.7)))
    assert [await ask(guard), await ask(guard)] == [None, score(0.7)]


# Breaker


async def test_scorer_that_fails_in_a_row_is_left_alone_for_its_rest() -> None:
    clock = Clock()
    scorer = Scripted(*[RuntimeError()] * 3)
    guard = guarded(scorer, clock, breaker_failures=3, breaker_s=10)
    for _ in range(6):
        assert await ask(guard) is None
    assert len(scorer.asked) == 3
    clock.now += 9.9
    assert await ask(guard) is None
    clock.now += 0.2
    assert await ask(guard) == score(0.9)


async def test_late_answers_open_the_breaker_too() -> None:
    scorer = Scripted(None, None, score(0.9))
    guard = guarded(scorer, breaker_failures=2)
    assert [await ask(guard) for _ in range(4)] == [None] * 4
    assert len(scorer.asked) == 2


async def test_success_in_between_keeps_the_breaker_closed() -> None:
    fails = RuntimeError()
    scorer = Scripted(fails, score(0.9), fails, score(0.9), fails)
    guard = guarded(scorer, breaker_failures=2, cache_entries=0)
    for _ in range(5):
        await ask(guard)
    assert await ask(guard) == score(0.9)


async def test_breaker_opens_again_where_the_scorer_still_fails() -> None:
    clock = Clock()
    scorer = Scripted(*[RuntimeError()] * 4)
    guard = guarded(scorer, clock, breaker_failures=2, breaker_s=10)
    for _ in range(2):
        for _ in range(4):
            await ask(guard)
        clock.now += 10.1
    assert len(scorer.asked) == 4


async def test_known_answers_are_given_while_the_scorer_rests() -> None:
    guard = guarded(Scripted(score(0.7), RuntimeError()), breaker_failures=1)
    assert await ask(guard, "known") == score(0.7)
    assert await ask(guard, "other") is None
    assert await ask(guard, "known") == score(0.7)


async def test_scorer_that_is_not_ready_has_not_failed() -> None:
    scorer = Scripted(*[NotReady()] * 5)
    guard = guarded(scorer, breaker_failures=1)
    assert [await ask(guard) for _ in range(5)] == [None] * 5
    assert (guard.late, guard.failed) == (0, 0)
    assert await ask(guard) == score(0.9)


async def test_start_and_close_reach_the_scorer() -> None:
    scorer = Scripted()
    guard = guarded(scorer)
    await guard.start()
    await guard.close()
    assert (scorer.started, scorer.closed) == (1, 1)
