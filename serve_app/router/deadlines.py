"""The time that one answer may take: until it begins, between its pieces, and in all."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Any

from serve_app.errors import ApiError
from serve_app.router.engine_call import EngineCall
from serve_app.router.reply import Reply

_NOT_BEGUN = "It was not begun to be answered"


class Late(ApiError):
    """504. `blames`: it says more of the replica than of the request."""

    def __init__(self, what: str, seconds: float, *, blames: bool) -> None:
        super().__init__(504, f"{what} within {seconds:g} s.", code="timeout")
        self.blames = blames


class Watch:
    """The clock beside one answer: a timer until it begins, one for a whole stream, two assignments for each chunk.

    As a context manager, in the task that answers, it raises `Late` out of its block.
    """

    def __init__(self, call: EngineCall, reply: Reply) -> None:
        self._call = call
        self._reply = reply
        self._loop = asyncio.get_running_loop()
        self._sent = self._loop.time()
        # Since when the engine has been silent; None while the client is the one that is waited for.
        self._silent_since: float | None = None
        self._runs = False
        self._begins: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[Any] | None = None
        self._comment: asyncio.Task[None] | None = None
        self._late: Late | None = None

    def __enter__(self) -> None:
        limits = self._until_it_begins()
        if not limits:
            return
        left_s = self._call.began + min(limits) - time.monotonic()
        if left_s <= 0:  # before anything is sent
            raise Late(_NOT_BEGUN, min(limits), blames=False)
        self._task = asyncio.current_task()
        self._begins = self._loop.call_later(left_s, self._not_begun, min(limits))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._late and self._task:
            self._task.uncancel()
            if isinstance(error, asyncio.CancelledError):
                raise self._late

    def _until_it_begins(self) -> list[float]:
        return [limit for limit in (self._call.ttft_s, self._call.total_s) if limit is not None]

    def _not_begun(self, limit_s: float) -> None:
        # Most of the time may have gone by in a queue, or while the model was loaded.
        self._end(Late(_NOT_BEGUN, limit_s, blames=self._loop.time() - self._sent >= limit_s / 2))

    def begin(self) -> None:
        """A stream's headers have come: until its first event it hears comments."""
        self._task = asyncio.current_task()
        self.client_waits()
        self._look()

    async def runs(self) -> None:
        """The first event has come. A comment that is being said is said first."""
        self._runs = True
        self.engine_waits()
        if self._comment and not self._comment.done():
            await asyncio.wait([self._comment])
        self.stop()
        self._look()

    def engine_waits(self) -> None:
        """The client is to take what came. However slow it is, the engine is not silent."""
        self._silent_since = None

    def client_waits(self) -> None:
        """The engine is to say more."""
        self._silent_since = self._loop.time()

    def stop(self) -> None:
        """The answer is over: say nothing more."""
        if self._begins:
            self._begins.cancel()
        if self._timer:
            self._timer.cancel()
        if self._comment:
            self._comment.cancel()

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
