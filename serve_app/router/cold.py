"""Has models woken: one control call per model and Router, which everybody who wants the model joins."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from serve_app.errors import ApiError, unavailable
from serve_app.models.replicas import Target

Acquire = Callable[[str], Awaitable[dict[str, Any]]]


class ColdStarts:
    """The loads that this Router waits for. A load goes on when its clients have left."""

    def __init__(self, acquire: Acquire) -> None:
        self._acquire = acquire
        self._calls: dict[str, asyncio.Task[Target]] = {}
        self._last: dict[str, Target] = {}

    def last(self, model: str) -> Target | None:
        """Where the model was found awake last; published states may be a second behind this."""
        return self._last.get(model)

    def forget(self, model: str) -> None:
        """The model is no longer where it was."""
        self._last.pop(model, None)

    def start(self, model: str) -> asyncio.Task[Target]:
        """The call that is under way for the model, or a new one. Its errors are `ApiError`s.

        Whoever waits for it must do so behind `asyncio.shield` or `asyncio.wait`: it is everybody's.
        """
        call = self._calls.get(model)
        if call is None:
            call = self._calls[model] = asyncio.create_task(self._wake(model))
            call.add_done_callback(lambda done: self._ended(model, done))
        return call

    def _ended(self, model: str, call: asyncio.Task[Target]) -> None:
        del self._calls[model]
        if not call.cancelled() and call.exception() is None:
            self._last[model] = call.result()

    async def _wake(self, model: str) -> Target:
        try:
            answer = await self._acquire(model)
        except (Exception, asyncio.CancelledError) as error:
            # Nobody here cancels the call: when it is cancelled, its replica is going.
            # Serve's own faults: the pool's replica died, or none can be placed.
            raise unavailable(
                f"{model} could not be loaded: {type(error).__name__}.",
                code="pool_unavailable",
                retry_after_s=5,
            ) from error
        if refused := answer.get("refused"):
            raise _refusal(model, refused)
        return Target(**answer["target"])


def _refusal(model: str, refused: dict[str, Any]) -> ApiError:
    return unavailable(
        f"{model} is not available: {refused['reason']}.",
        code=refused["code"],
        retry_after_s=refused["retry_after_s"],
    )
