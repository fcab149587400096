"""Has models woken: one control call per model and Router, which everybody who wants the model joins."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, Protocol

from serve_app.errors import ApiError, unavailable
from serve_app.models.replicas import Target

logger = logging.getLogger(__name__)


class PoolCalls(Protocol):
    """What a Router asks of the pool; the answers are those of `LazyPool`'s methods of the same names."""

    async def acquire(self, model: str, avoid: Collection[str] = ()) -> dict[str, Any]:
        """Have the model awake on a replica that is none of those to `avoid`."""

    async def order(self, model: str, order: str, only: str | None = None) -> dict[str, Any]:
        """Have an operator's order carried out, by `only` this replica or by the one that is best for it."""


# After a fault of Serve's own (the pool's replica died, none can be placed), or where the replica was about to be
# stopped, ask again, while somebody waits.
_ASK_AGAIN_S = 0.5
_CLOSING = "closing"


class ColdStarts:
    """The loads that this Router waits for.

    A pool answers after seconds with `pending`, and is asked again as long as somebody waits. So a load that has
    begun goes on when its clients have left, but a wait for room ends with them.
    """

    def __init__(self, pool: PoolCalls) -> None:
        self._pool = pool
        self._calls: dict[str, asyncio.Task[Target]] = {}
        self._waiting: Counter[str] = Counter()
        self._last: dict[str, Target] = {}

    def waiting(self, model: str) -> int:
        """How many requests wait for the model here."""
        return self._waiting[model]

    def all_waiting(self) -> int:
        """How many requests wait for any model here."""
        return self._waiting.total()

    def last(self, model: str) -> Target | None:
        """Where the model was found awake last; published states may be a second behind this."""
        return self._last.get(model)

    def forget(self, model: str) -> None:
        """The model is no longer where it was."""
        self._last.pop(model, None)

    @contextlib.contextmanager
    def wait(self, model: str) -> Iterator[asyncio.Task[Target]]:
        """Join the call that is under way for the model, or a new one. Its errors are `ApiError`s.

        Wait for it with `asyncio.wait`, which does not cancel it: it is everybody's.
        """
        self._waiting[model] += 1
        try:
            call = self._calls.get(model)
            if call is None or call.done():
                call = self._calls[model] = asyncio.create_task(self._wake(model))
                call.add_done_callback(lambda done: self._ended(model, done))
            yield call
        finally:
            self._waiting[model] -= 1

    def _ended(self, model: str, call: asyncio.Task[Target]) -> None:
        if self._calls.get(model) is call:
            del self._calls[model]  # the next one who comes asks anew
        if not call.cancelled() and call.exception() is None:
            self._last[model] = call.result()

    async def _wake(self, model: str) -> Target:
        while True:
            try:
                answer = await self._pool.acquire(model)
            except (Exception, asyncio.CancelledError) as error:
                # Nobody here cancels the call: when it is cancelled, its replica is going.
                logger.warning("the pool did not answer for %s: %s", model, type(error).__name__)
                await asyncio.sleep(_ASK_AGAIN_S)
                answer = {"pending": True}
            refused = answer.get("refused")
            if refused and refused["code"] != _CLOSING:
                raise refusal(model, refused)
            if refused:
                # Scaled down or upgraded just now: another replica will do, or a new one.
                await asyncio.sleep(_ASK_AGAIN_S)
            if target := answer.get("target"):
                return Target(**target)
            if not self._waiting[model]:
                raise unavailable(f"{model} is not waited for any more.", code="abandoned", retry_after_s=1)


def refusal(model: str, refused: dict[str, Any]) -> ApiError:
    """What a client is told of a pool's `refused`."""
    return unavailable(
        f"{model} is not available: {refused['reason']}.",
        code=refused["code"],
        retry_after_s=refused["retry_after_s"],
    )
