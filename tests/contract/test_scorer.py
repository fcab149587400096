"""The embedding scorer's real process: it judges, it comes back when it dies, it ends when it is closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from serve_app.routing.excerpt import Excerpt, read_excerpt
from serve_app.scoring.embedding import EmbeddingScorer
from serve_app.scoring.guard import NotReady
from serve_app.scoring.sequence import LONGEST

START_S = 90

HARD = [
    "Twelve people, three boats that hold 5, 4 and 3, no couple in one boat; how many ways?",
    "有三个开关和一盏灯，只能进房间一次，开关之间还互相影响：同时开两个会跳闸。怎么判断哪个开关控制灯，最少要几步？",
]
EASY = ["Write a short birthday card for my aunt.", "把下面这句话翻译成英文：我们明天下午三点在老地方见。"]


def excerpt(text: str) -> Excerpt:
    return read_excerpt([{"role": "user", "content": text}])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scorer() -> AsyncIterator[EmbeddingScorer]:
    made = EmbeddingScorer(threads=1)
    await made.start()
    await asyncio.wait_for(made.ready(), START_S)
    yield made
    await made.close()


def processes() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if "serve_app.scoring.worker" in child.cmdline()]


@pytest.mark.asyncio(loop_scope="module")
async def test_hard_requests_score_above_easy_ones_in_both_languages(scorer: EmbeddingScorer) -> None:
    hard = [await scorer.score(excerpt(text), {}) for text in HARD]
    easy = [await scorer.score(excerpt(text), {}) for text in EASY]
    assert min(score.think for score in hard) >= hard[0].think_at > max(score.think for score in easy)
    assert {score.kind for score in hard + easy} == {"embedding"}


@pytest.mark.asyncio(loop_scope="module")
async def test_any_text_is_judged(scorer: EmbeddingScorer) -> None:
    for text in ("", " ", "\x00", "\ud800", "🦆" * 5000, "a" * 1_000_000, "中" * 100_000, "\n" * 10_000):
        score = await scorer.score(excerpt(text), {})
        assert 0 <= score.think <= 1
        assert 0 <= score.large <= 1


@pytest.mark.asyncio(loop_scope="module")
async def test_questions_at_the_same_time_get_their_own_answers(scorer: EmbeddingScorer) -> None:
    texts = [*HARD, *EASY]
    one_by_one = [await scorer.score(excerpt(text), {}) for text in texts]
    at_once = await asyncio.gather(*(scorer.score(excerpt(text), {}) for text in texts))
    assert [score.think for score in at_once] == [score.think for score in one_by_one]


@pytest.mark.asyncio(loop_scope="module")
async def test_an_answer_that_nobody_waits_for_any_more_disturbs_no_later_one(scorer: EmbeddingScorer) -> None:
    before = await scorer.score(excerpt(EASY[0]), {})
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(scorer.score(excerpt("word " * LONGEST), {}), 0.001)
    assert await scorer.score(excerpt(EASY[0]), {}) == before


@pytest.mark.asyncio(loop_scope="module")
async def test_a_process_that_is_killed_is_started_again(scorer: EmbeddingScorer) -> None:
    (process,) = processes()
    process.kill()
    deadline = asyncio.get_running_loop().time() + START_S
    while True:
        assert asyncio.get_running_loop().time() < deadline
        try:
            score = await scorer.score(excerpt(HARD[0]), {})
            break
        except (NotReady, RuntimeError, OSError):
            await asyncio.sleep(0.1)
    assert score.kind == "embedding"


async def test_nothing_is_left_of_a_closed_scorer() -> None:
    made = EmbeddingScorer(threads=1)
    with pytest.raises(NotReady):
        await made.score(excerpt("hi"), {})
    before = len(processes())
    deadline = asyncio.get_running_loop().time() + START_S
    while len(processes()) == before:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.05)
    (process,) = processes()[-1:]
    await made.close()
    await asyncio.to_thread(process.wait, 10)
    assert not process.is_running()
