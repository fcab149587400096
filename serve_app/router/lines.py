"""The queues before the models: requests that found every place taken wait here for their turn."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from serve_app.admission.queue import FairQueue, Ticket
from serve_app.errors import ApiError, unavailable
from serve_app.model_schema import Queue
from serve_app.router.reply import Reply

# Places are freed by other Routers too, of which nobody tells us.
_POLL_S = 0.05
_SMOOTHING = 0.1
_FIRST_GUESS_S = 1.0
# OpenAI's clients come back exactly when they are told, all of a crowd that was refused together; and heed no more than
# a minute.
_SPREAD_S = 30.0


class Updates:
    """What a stream hears while it waits: its place, every `every_s`, however often it has its turn in vain.

    The first of them is its 200: a refusal after that is an event, which clients do not try again by themselves as they
    do a 503. So `every_s` is no less than proxies need.
    """

    def __init__(self, reply: Reply, model_id: str, every_s: float) -> None:
        self._reply = reply
        self._model_id = model_id
        self._every_s = every_s
        self._next = time.monotonic() + every_s

    def due_in_s(self) -> float | None:
        """None: never."""
        return max(0.0, self._next - time.monotonic()) if self._reply.stream else None

    async def tell(self, place: int) -> None:
        """Say it, and be silent again for a while."""
        await self._reply.comment(f"waits for {self._model_id}, place {place}")
        self._next = time.monotonic() + self._every_s


class Line:
    """The queue before one model, in one Router."""

    def __init__(self, model_id: str, settings: Queue, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._model_id = model_id
        self._settings = settings
        self._clock = clock
        self._queue = FairQueue(settings.size)
        self._turns: dict[int, asyncio.Future[None]] = {}
        # Since the last poll: places that were freed here, and turns that found none.
        self._freed = 0
        self._vain = 0
        self._polling: asyncio.Task[None] | None = None
        self._ended_at: float | None = None
        self._between_ends_s = _FIRST_GUESS_S
        # When the last one that was refused was told to come back.
        self._back_at = -math.inf

    def __len__(self) -> int:
        return len(self._queue)

    def change(self, settings: Queue) -> None:
        """New settings; who waits already keeps the place and the patience."""
        self._settings = settings
        self._queue.resize(settings.size)

    def started(self, key: str) -> None:
        """A request of this key has a place."""
        self._queue.started(key)

    def withdrew(self, key: str) -> None:
        """It had no place after all, so none is free for another one."""
        self._queue.withdrew(key)

    def ended(self, key: str) -> None:
        """Its place is free again."""
        now = self._clock()
        if self._ended_at is not None:
            self._between_ends_s += _SMOOTHING * (now - self._ended_at - self._between_ends_s)
        # Between two ends of a model that is not full there may be a night.
        self._ended_at = now if len(self._queue) else None
        self._queue.ended(key)
        self._freed += 1
        self._let_in()

    async def turn(
        self, key: str, priority: int, again: Ticket | None = None, updates: Updates | None = None
    ) -> Ticket:
        """Wait until it is this request's turn to try for a place. `again`: it had its turn, and found none.

        Raises `ApiError` (503): the queue is full, somebody more important came, or it waited too long.
        """
        if again is None:
            ticket, loser = self._queue.join(key, priority, self._clock() + self._settings.wait_s)
            if loser is not None and loser.number == ticket.number:
                raise self._full()
            if loser is not None and (turn := self._turns.pop(loser.number, None)) and not turn.done():
                turn.set_exception(self._full())
        else:
            ticket = again
            self._queue.rejoin(ticket)
            self._vain += 1
        turn = self._turns[ticket.number] = asyncio.get_running_loop().create_future()
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll())
        try:
            while updates and not turn.done():
                await asyncio.wait([turn], timeout=updates.due_in_s())
                if not turn.done():
                    await updates.tell(self._queue.place(ticket))
            await turn
        finally:
            self._queue.leave(ticket)
            self._turns.pop(ticket.number, None)
        return ticket

    def _let_in(self) -> None:
        if ticket := self._queue.next():
            turn = self._turns.get(ticket.number)
            if turn and not turn.done():
                turn.set_result(None)

    async def _poll(self) -> None:
        while len(self._queue):
            await asyncio.sleep(_POLL_S)
            for ticket in self._queue.overdue(self._clock()):
                if (turn := self._turns.get(ticket.number)) and not turn.done():
                    turn.set_exception(self._late())
            # An engine counts a request until a moment after its last byte: such a place is tried once more.
            tries, self._freed, self._vain = 1 + min(self._freed, self._vain), 0, 0
            for _ in range(tries):
                self._let_in()

    def _full(self) -> ApiError:
        return unavailable(
            f"Every place of {self._model_id} is taken, and {len(self._queue)} requests wait before this one.",
            code="overloaded",
            retry_after_s=self._back_in_s(),
        )

    def _late(self) -> ApiError:
        return unavailable(
            f"Every place of {self._model_id} was taken for {self._settings.wait_s:g} s.",
            code="overloaded",
            retry_after_s=self._back_in_s(),
        )

    def _back_in_s(self) -> float:
        """When those before it will be done; of several that are refused one comes after the other, as places free."""
        soonest = self._clock() + max(1.0, (len(self._queue) + 1) * self._between_ends_s)
        self._back_at = max(soonest, self._back_at + self._between_ends_s)
        if self._back_at > soonest + _SPREAD_S:
            self._back_at = soonest
        return self._back_at - self._clock()
