"""Waiting in turns: a Router asks every few seconds for a model that is not there yet, and keeps its place between."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

# A Router asks again at once. One whose last client left does not, and its claim must not outlive that for long.
COMES_BACK_S = 1.0


class Waiting(Generic[T]):
    """Waits for `acquire`, which may take long, in turns that do not."""

    def __init__(self, acquire: Callable[[str], Awaitable[T]]) -> None:
        self._acquire = acquire
        # The claims of those who were told to ask again, and when they are given up.
        self._between: defaultdict[str, dict[asyncio.Future[T], asyncio.TimerHandle]] = defaultdict(dict)

    async def acquire(self, model: str, turn_s: float) -> T:
        """What `acquire` gives, or raises. `TimeoutError` after a turn of `turn_s`: whoever asks again within
        `COMES_BACK_S` goes on as if never interrupted. Whoever is cancelled gives its place up.
        """
        claim = self._taken_up(model) or asyncio.ensure_future(self._acquire(model))
        try:
            return await asyncio.wait_for(asyncio.shield(claim), turn_s)
        except TimeoutError:
            timer = asyncio.get_running_loop().call_later(COMES_BACK_S, self._give_up, model, claim)
            self._between[model][claim] = timer
            raise
        except asyncio.CancelledError:
            claim.cancel()
            raise

    def _taken_up(self, model: str) -> asyncio.Future[T] | None:
        if model not in self._between:
            return None
        claims = self._between[model]
        claim = next(iter(claims))
        claims.pop(claim).cancel()
        if not claims:
            del self._between[model]
        return claim

    def _give_up(self, model: str, claim: asyncio.Future[T]) -> None:
        self._between[model].pop(claim)
        if not self._between[model]:
            del self._between[model]
        if not claim.cancel() and not claim.cancelled():
            claim.exception()  # nobody else will look at it
