"""The time that one answer may take: until it begins, between its pieces, and in all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

from serve_app.errors import ApiError
from serve_app.router.engine_call import EngineCall
from serve_app.router.reply import Reply

_NOT_BEGUN = "It was not begun to be answered"
_T = TypeVar("_T")


class Late(ApiError):
    """504. `blames`: it says more of the replica than of the request."""

    def __init__(self, what: str, seconds: float, *, blames: bool) -> None:
        super().__init__(504, f"{what} within {seconds:g} s.", code="timeout")
        self.blames = blames


class Watch:
    """The clock beside one answer: one timer for a whole stream, and two assignments for each of its chunks."""

    def __init__(self, call: EngineCall, reply: Reply) -> None:
        self._call = call
        self._reply = reply
        self._loop = asyncio.get_running_loop()
        self._sent = self._loop.time()
        # Since when the engine has been silent; None while the client is the one that is waited for.
        self._silent_since: float | None = None
        self._runs = False
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[Any] | None = None
        self._comment: asyncio.Task[None] | None = None
        self._late: Late | None = None

    async def first(self, waiting: Awaitable[_T]) -> _T:
        """Wait for what comes first; raises `ApiError` (504) when it comes too late."""
        limits = [limit for limit in (self._call.ttft_s, self._call.total_s) if limit is not None]
        if not limits:
            return await waiting
        try:
            async with asyncio.timeout_at(self._loop.time() + self._call.began + min(limits) - time.monotonic()) as at:
                return await waiting
        except TimeoutError:
            if not at.expired():
                raise
            # Most of the time may have gone by in a queue, or while the model was loaded.
            blames = self._loop.time() - self._sent >= min(limits) / 2
            raise Late(_NOT_BEGUN, min(limits), blames=blames) from None

    def raise_if_over(self) -> None:
        """Before anything is sent: is there time left?"""
        limits = [limit for limit in (self._call.ttft_s, self._call.total_s) if limit is not None]
        if limits and time.monotonic() - self._call.began >= min(limits):
            raise Late(_NOT_BEGUN, min(limits), blames=False)

    def begin(self) -> None:
        """A stream's headers have come: until its first event it hears comments, and `first` looks at the time."""
        self._task = asyncio.current_task()
        self.client_waits()
        self._look()

    async def runs(self) -> None:
        """The first event has come. A comment that is being said is said first."""
        self._runs = True
        self.engine_waits()
        if self._comment and not self._comment.done():
            await asyncio.wait([self._comment])
        if self._timer:
            self._timer.cancel()
        self._look()

    def engine_waits(self) -> None:
        """The client is to take what came. However slow it is, the engine is not silent."""
        self._silent_since = None

    def client_waits(self) -> None:
        """The engine is to say more."""
        self._silent_since = self._loop.time()

    def stop(self) -> None:
        """The answer is over: say nothing more."""
        if self._timer:
            self._timer.cancel()
        if self._comment:
            self._comment.cancel()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.stop()

    def raise_if_late(self) -> None:
        """After the task was cancelled: was it this clock?"""
        if self._late and self._task:
            self._task.uncancel()
            raise self._late

    def _look(self) -> None:
        call = self._call
        silent_s = 0.0 if self._silent_since is None else self._loop.time() - self._silent_since
        idle_s, total_s = (call.idle_s, call.total_s) if self._runs else (None, None)
        if idle_s is not None and silent_s >= idle_s:
            self._end(Late("The engine said nothing more", idle_s, blames=True))
            return
        if total_s is not None and time.monotonic() - call.began >= total_s:
            self._end(Late("The answer was not complete", total_s, blames=False))
            return
        if silent_s >= call.comment_s and (self._comment is None or self._comment.done()):
            self._comment = self._loop.create_task(self._reply.comment("the engine works on it"))
        waits = [call.comment_s]
        if idle_s is not None:
            waits.append(idle_s - silent_s)
        if total_s is not None:
            waits.append(call.began + total_s - time.monotonic())
        self._timer = self._loop.call_later(max(0.01, min(waits)), self._look)

    def _end(self, late: Late) -> None:
        self._late = late
        if self._task:
            self._task.cancel()
