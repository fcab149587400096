"""Runs the lines of one group, as many at once as there is room for; used by the service and the command line.

When there is no room any more, lines that run are given up and begin anew later: interactive requests come first. A
line that was given up a few times is let run to its end, so that every batch ends some day.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import heapq
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence

import orjson

from serve_app.batches.ledger import Result
from serve_app.batches.plan import Line, again
from serve_app.errors import ApiError

LOOK_S = 0.05
_MAX_YIELDS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What came back for a line. `body` is JSON."""

    status: int
    body: bytes
    request_id: str
    retry_after_s: float | None = None


def refused(error: ApiError, request_id: str) -> Answer:
    """A line that was not sent on."""
    return Answer(error.status, orjson.dumps(error.payload()), request_id, error.retry_after_s)


@dataclasses.dataclass(slots=True)
class _Attempt:
    line: Line
    tries: int = 0
    yields: int = 0


class Drive:
    """`ask` sends a line; cancelled, it drops it. `room` says how many may run now. `record` keeps results durably."""

    def __init__(
        self,
        ask: Callable[[Line], Awaitable[Answer]],
        room: Callable[[], int],
        record: Callable[[Sequence[Result]], Awaitable[None]],
        *,
        stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._room = room
        self._record = record
        self._stop = stop
        self._clock = clock
        self._waiting: deque[_Attempt] = deque()
        self._later: list[tuple[float, int, _Attempt]] = []
        self._running: dict[asyncio.Task[Answer], _Attempt] = {}
        self._paused_until = 0.0

    async def run(self, lines: Iterable[Line]) -> bool:
        """Run them all; False if they were stopped before. What has an answer by then is recorded."""
        self._waiting.extend(_Attempt(line) for line in lines)
        try:
            while self._waiting or self._later or self._running:
                if self._stop():
                    return False
                self._make_room()
                self._begin()
                if self._running:
                    await asyncio.wait(self._running, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                    await self._collect()
                else:
                    await asyncio.sleep(LOOK_S)
            return True
        finally:
            await self._drop(list(self._running))

    def _make_room(self) -> None:
        if not self._running or self._room() > 0:
            return
        for task, attempt in self._running.items():
            if attempt.yields < _MAX_YIELDS and not task.done():
                # It is dropped when its end is collected.
                task.cancel()

    def _begin(self) -> None:
        now = self._clock()
        while self._later and self._later[0][0] <= now:
            self._waiting.append(heapq.heappop(self._later)[2])
        if now < self._paused_until:
            return
        free = self._room() - len(self._running)
        while self._waiting and free > 0:
            attempt = self._waiting.popleft()
            self._running[asyncio.ensure_future(self._ask(attempt.line))] = attempt
            free -= 1

    async def _collect(self) -> None:
        results = []
        for task in [task for task in self._running if task.done()]:
            attempt = self._running.pop(task)
            if task.cancelled():
                attempt.yields += 1
                self._waiting.appendleft(attempt)
            elif result := self._result(attempt, task.result()):
                results.append(result)
        if results:
            await self._record(results)

    def _result(self, attempt: _Attempt, answer: Answer) -> Result | None:
        attempt.tries += 1
        retry = again(answer.status, error_code(answer), answer.retry_after_s, attempt.tries)
        if retry is None:
            return Result(attempt.line.custom_id, answer.request_id, answer.status, answer.body)
        ready_at = self._clock() + retry.wait_s
        heapq.heappush(self._later, (ready_at, attempt.line.number, attempt))
        if retry.pause:
            self._paused_until = max(self._paused_until, ready_at)
        return None

    async def _drop(self, tasks: list[asyncio.Task[Answer]]) -> None:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        finished = [
            result
            for task in tasks
            if not task.cancelled() and task.exception() is None
            if (result := self._result(self._running[task], task.result()))
        ]
        self._running.clear()
        if finished:
            with contextlib.suppress(OSError):
                await self._record(finished)


def error_code(answer: Answer) -> str | None:
    """OpenAI's `code` of an error."""
    if answer.status < 400:
        return None
    try:
        code = orjson.loads(answer.body)["error"]["code"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return code if isinstance(code, str) else None
