"""serve_app.router.cold: who waits for a model gets it, whatever becomes of the replica that was asked."""

import asyncio
from collections.abc import Collection
from typing import Any

import pytest

from serve_app.errors import ApiError
from serve_app.models.replicas import Target
from serve_app.router import cold
from serve_app.router.cold import ColdStarts

TARGET = {"replica_id": "r", "url": "http://127.0.0.1:1", "secret": "s"}
CLOSING = {"refused": {"code": "closing", "reason": "its replica is shutting down", "retry_after_s": 2.0}}
FAILED = {"refused": {"code": "load_failed", "reason": "no weights", "retry_after_s": 9.0}}


class Pool:
    """Answers calls one after the other with what it was given."""

    def __init__(self, *answers: dict[str, Any] | BaseException) -> None:
        self.answers = list(answers)

    async def acquire(self, model: str, avoid: Collection[str] = ()) -> dict[str, Any]:
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def order(self, model: str, order: str, only: str | None = None) -> dict[str, Any]:
        raise AssertionError("nobody orders anything here")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold, "_ASK_AGAIN_S", 0)


async def waited(pool: Pool) -> Target:
    with ColdStarts(pool).wait("m") as call:
        await asyncio.wait([call], timeout=5)
    return call.result()


@pytest.mark.parametrize(
    "first",
    [
        pytest.param({"pending": True}, id="it still loads"),
        pytest.param(CLOSING, id="the replica is being scaled down"),
        pytest.param(RuntimeError("actor died"), id="the replica died"),
        pytest.param(asyncio.CancelledError(), id="the replica is gone"),
    ],
)
async def test_the_pool_is_asked_again_while_somebody_waits(first: dict[str, Any] | BaseException) -> None:
    assert await waited(Pool(first, {"target": TARGET})) == Target(**TARGET)


async def test_a_refusal_for_the_models_own_sake_is_passed_on() -> None:
    with pytest.raises(ApiError) as refused:
        await waited(Pool(FAILED))
    assert refused.value.code == "load_failed"


@pytest.mark.parametrize("answer", [{"pending": True}, CLOSING])
async def test_nobody_is_asked_for_who_has_left(answer: dict[str, Any]) -> None:
    pool = Pool(answer, {"target": TARGET})
    with ColdStarts(pool).wait("m") as call:
        pass
    await asyncio.wait([call], timeout=5)
    with pytest.raises(ApiError):
        call.result()
    assert len(pool.answers) == 1
