"""Works on batches: checks new ones at once, runs the lines of one after the other, and writes what came out.

Runs in every Router on the same directory. One of them at a time runs lines, and each batch has one owner at a time;
its log of results is all that an owner must know of the one before.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import IO, ParamSpec, Protocol, TypeVar

import orjson

from serve_app.batches.drive import Answer, Drive, refused
from serve_app.batches.ledger import Result
from serve_app.batches.plan import Bounds, Group, Line, Load, Plan, body_of, groups, lane
from serve_app.batches.state import moved
from serve_app.batches.store import Claim, Store
from serve_app.errors import ApiError, bad_request
from serve_app.service_schema import Batches

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_STOP_LOOK_S = 0.25
_SAVE_EVERY_S = 1.0
_ASIDE_S = 30.0
_SWEEP_EVERY_S = 3600.0

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Service(Protocol):
    """What answers lines."""

    def engine_of(self, model: str) -> str | None:
        """The engine that answers a model's name; None where the router chooses, the name where nobody knows it."""

    def awake(self, engine: str) -> bool:
        """Whether it would answer at once."""

    def load(self, engine: str | None) -> Load:
        """How busy it is with interactive requests."""

    async def ask(self, key: str, url: str, body: bytes, request_id: str) -> Answer:
        """Have it answer for the owner of a key. Cancelled, the engine stops at once."""


class Runner:
    """`max_line_bytes`: larger lines are refused."""

    def __init__(
        self,
        store: Store,
        service: Service,
        settings: Batches,
        max_line_bytes: int,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._service = service
        self._settings = settings
        self._max_line_bytes = max_line_bytes
        self._now = now
        self._aside: dict[str, float] = {}
        self._lane: IO[bytes] | None = None
        # Of the batch that is worked on here.
        self.lines_left = 0

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._again_and_again(self._tend, _LOOK_S))
                tasks.create_task(self._again_and_again(self._work, _LOOK_S))
                tasks.create_task(self._again_and_again(self._sweep, _SWEEP_EVERY_S))
        finally:
            if self._lane:
                self._lane.close()

    async def _again_and_again(self, look: Callable[[], Coroutine[object, object, None]], every_s: float) -> None:
        while True:
            try:
                await look()
            except Exception:
                logger.exception("batches: could not go on")
            await asyncio.sleep(every_s)

    async def _sweep(self) -> None:
        await whole(self._store.sweep)

    async def _tend(self) -> None:
        """What needs no engine: check new batches, end those that nobody will run any more."""
        for key, batch_id in await whole(self._store.active):
            await self._with_claim(key, batch_id, work=False)

    async def _work(self) -> None:
        """Run the oldest batch; then look anew, for there may be an older one now."""
        if self._lane is None:
            self._lane = await whole(self._store.lane)
        if self._lane is None:
            return
        for key, batch_id in await whole(self._store.active):
            if await self._with_claim(key, batch_id, work=True):
                return

    async def _with_claim(self, key: str, batch_id: str, *, work: bool) -> bool:
        """Bring a batch on; whether it was worked on."""
        if self._now() < self._aside.get(batch_id, 0.0):
            return False
        claim = await whole(self._store.claim, key, batch_id)
        if claim is None:
            return False
        try:
            return await self._advance(claim, work=work)
        except Exception:
            logger.exception("%s: put aside for %g s", batch_id, _ASIDE_S)
            self._aside = {one: until for one, until in self._aside.items() if until > self._now()}
            self._aside[batch_id] = self._now() + _ASIDE_S
            return False
        finally:
            claim.close()

    async def _advance(self, claim: Claim, *, work: bool) -> bool:
        cancelled_at = await whole(claim.cancelled_at)
        if cancelled_at is not None and claim.batch.status in ("validating", "in_progress"):
            await self._cancel(claim, cancelled_at)
        if claim.batch.status == "validating":
            plan = await self._plan(claim)
            if plan.problems:
                await whole(claim.save, moved(claim.batch, "failed", self._now(), problems=plan.problems))
            else:
                await whole(claim.save, moved(claim.batch, "in_progress", self._now(), total=len(plan.lines)))
        worked = work and claim.batch.status == "in_progress"
        if worked:
            await self._run(claim)
        elif claim.batch.status == "in_progress" and self._late(claim):
            await whole(claim.save, moved(claim.batch, "finalizing", self._now(), late=True))
        if claim.batch.status in ("finalizing", "cancelling"):
            await self._finish(claim)
        return worked

    async def _cancel(self, claim: Claim, at: float) -> None:
        await whole(claim.save, moved(await whole(claim.counted), "cancelling", at))

    def _late(self, claim: Claim) -> bool:
        return self._now() >= claim.batch.expires_at

    async def _plan(self, claim: Claim) -> Plan:
        bounds = Bounds(self._settings.max_lines, self._max_line_bytes, claim.batch.endpoint)
        return await whole(claim.plan, bounds)

    async def _left(self, claim: Claim) -> list[Line]:
        plan = await self._plan(claim)
        ledger = await whole(lambda: claim.ledger)
        return [line for line in plan.lines if line.custom_id not in ledger]

    async def _run(self, claim: Claim) -> None:
        left = await self._left(claim)
        self.lines_left = len(left)
        stopped = asyncio.Event()
        watching = asyncio.create_task(self._watch(claim, stopped))
        try:
            for group in groups(left, self._service.engine_of, self._service.awake):
                if not await self._run_group(claim, group, stopped):
                    break
        finally:
            self.lines_left = 0
            watching.cancel()
            await asyncio.wait([watching])
        batch = await whole(claim.counted)
        cancelled_at = await whole(claim.cancelled_at)
        if batch.completed + batch.failed == batch.total:
            await whole(claim.save, moved(batch, "finalizing", self._now()))
        elif cancelled_at is not None:
            await self._cancel(claim, cancelled_at)
        else:
            await whole(claim.save, moved(batch, "finalizing", self._now(), late=True))

    async def _watch(self, claim: Claim, stopped: asyncio.Event) -> None:
        while await whole(claim.cancelled_at) is None and not self._late(claim):  # noqa: ASYNC110 # another process's
            await asyncio.sleep(_STOP_LOOK_S)
        stopped.set()

    async def _run_group(self, claim: Claim, group: Group, stopped: asyncio.Event) -> bool:
        saved_at = time.monotonic()

        async def ask(line: Line) -> Answer:
            raw = await asyncio.to_thread(claim.raw, line.start, line.size)
            return await self._ask(claim.batch.key, line.url, raw)

        async def record(results: Sequence[Result]) -> None:
            nonlocal saved_at
            await whole(claim.ledger.add, results)
            self.lines_left -= len(results)
            if time.monotonic() - saved_at > _SAVE_EVERY_S:
                saved_at = time.monotonic()
                await whole(claim.save, claim.counted())

        def room() -> int:
            return lane(self._service.load(group.engine), self._settings)

        return await Drive(ask, room, record, stop=stopped.is_set).run(group.lines)

    async def _ask(self, key: str, url: str, raw: bytes) -> Answer:
        request_id = uuid.uuid4().hex
        try:
            return await self._service.ask(key, url, body_of(raw), request_id)
        except orjson.JSONEncodeError:
            return refused(bad_request("The body is nested too deeply.", code="invalid_json"), request_id)
        except Exception:
            # A fault with one line must not keep all others from running.
            logger.exception("%s: a line failed", key)
            return refused(ApiError(500, "The router failed on this request.", code="internal_error"), request_id)

    async def _finish(self, claim: Claim) -> None:
        if claim.batch.late:
            error = ("batch_expired", "The batch expired before this request was run.")
            late = [Result(line.custom_id, uuid.uuid4().hex, None, error=error) for line in await self._left(claim)]
            await whole(claim.ledger.add, late)
        await whole(claim.finish, self._now())


async def whole(step: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Do it in a thread; cancelled, end it first: the claim must not be let go while something is still written."""
    doing = asyncio.ensure_future(asyncio.to_thread(step, *args, **kwargs))
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        await asyncio.wait([doing])
        raise
