"""Moves one request to an engine and its answer back, as bytes. Nothing is done per chunk but passing it on."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, MutableMapping
from typing import Any, Protocol, TypeVar

import orjson

from serve_app.admission.breaker import Breaker
from serve_app.engines.base import REFUSAL_HEADER
from serve_app.errors import ApiError
from serve_app.models.replicas import Target
from serve_app.router.dialect import Dialect
from serve_app.router.engine_errors import broken, engine_error, stream_error
from serve_app.router.foreign import ForeignStream, elsewhere, refused_by
from serve_app.router.reply import Reply
from serve_app.router.tally import Tally
from serve_app.router.upstream import Answer, Broken, ConnectTimeout, Unreachable, Upstream, UpstreamError
from serve_app.router.wire import Wire

_EVENT_END = b"\n\n"
_NOT_BEGUN = "It was not begun to be answered"
_REFUSAL = REFUSAL_HEADER.lower().encode()
_T = TypeVar("_T")


class Shape(Protocol):
    """What is done to one answer on its way: nothing, as a rule."""

    def whole(self, body: bytes) -> bytes:
        """An answer that is not streamed."""

    def events(self, data: bytes) -> bytes:
        """Whole events of a stream."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineCall:
    """One request as an engine gets it, and what is done to its answer. Times in seconds; None: no limit.

    `began`: when the client's request came (`time.monotonic`), from which `ttft_s` and `total_s` count.
    """

    path: str
    body: bytes
    headers: MutableMapping[str, str]
    shape: Shape
    tally: Tally
    began: float
    ttft_s: float | None = None
    idle_s: float | None = None
    total_s: float | None = None
    comment_s: float = 15.0


class NotServed(Exception):
    """Nothing of an answer was sent: the request may go elsewhere. `reason` is a word.

    `died`: a kept-alive connection broke when it was used again; most likely its engine was killed while it was
    idle. On a new connection it would be the request that kills engines, and must not get another.
    `told`: what the client is told if it can go nowhere else.
    """

    def __init__(self, reason: str, *, died: bool = False, told: ApiError | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.died = died
        self.told = told


class _Late(ApiError):
    """504. `blames`: it says more of the replica than of the request."""

    def __init__(self, what: str, seconds: float, *, blames: bool) -> None:
        super().__init__(504, f"{what} within {seconds:g} s.", code="timeout")
        self.blames = blames


class _Watch:
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
        self._late: _Late | None = None

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
            raise _Late(_NOT_BEGUN, min(limits), blames=blames) from None

    def raise_if_over(self) -> None:
        """Before anything is sent: is there time left?"""
        limits = [limit for limit in (self._call.ttft_s, self._call.total_s) if limit is not None]
        if limits and time.monotonic() - self._call.began >= min(limits):
            raise _Late(_NOT_BEGUN, min(limits), blames=False)

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
            self._end(_Late("The engine said nothing more", idle_s, blames=True))
            return
        if total_s is not None and time.monotonic() - call.began >= total_s:
            self._end(_Late("The answer was not complete", total_s, blames=False))
            return
        if silent_s >= call.comment_s and (self._comment is None or self._comment.done()):
            self._comment = self._loop.create_task(self._reply.comment("the engine works on it"))
        waits = [call.comment_s]
        if idle_s is not None:
            waits.append(idle_s - silent_s)
        if total_s is not None:
            waits.append(call.began + total_s - time.monotonic())
        self._timer = self._loop.call_later(max(0.01, min(waits)), self._look)

    def _end(self, late: _Late) -> None:
        self._late = late
        if self._task:
            self._task.cancel()


class Relay:
    """The connections to all engines, pooled and kept alive, and how many requests run on each replica."""

    def __init__(self, connect_timeout_s: float) -> None:
        self.in_flight: Counter[str] = Counter()
        self.breaker = Breaker()
        self._upstream = Upstream(connect_timeout_s)

    async def close(self) -> None:
        """Close every connection."""
        await self._upstream.close()

    async def healthy(self, target: Target, timeout_s: float) -> bool:
        """Whether the engine says that it is alive."""
        return await self.probe(target, "/health", timeout_s) == 200

    async def probe(self, target: Target, path: str, timeout_s: float) -> int:
        """The status with which one of its paths answers; 0 where nothing does."""
        try:
            async with asyncio.timeout(timeout_s):
                with await self._upstream.get(target, path) as answer:
                    return answer.status
        except (UpstreamError, OSError):
            return 0

    async def fetch(self, target: Target, path: str, timeout_s: float) -> bytes | None:
        """What one of its paths answers; None where nothing does, or not 200."""
        try:
            async with asyncio.timeout(timeout_s):
                with await self._upstream.get(target, path) as answer:
                    return await answer.read() if answer.status == 200 else None
        except (UpstreamError, OSError):
            return None

    async def call(self, target: Target, path: str, body: bytes) -> dict[str, Any]:
        """One small request of the Router's own. Raises `UpstreamError`, or `ApiError` for a refusal."""
        with await self._upstream.post(target, path, {}, body) as answer:
            if answer.status != 200:
                raise await engine_error(answer)
            found: dict[str, Any] = orjson.loads(await answer.read())
            return found

    async def run(self, target: Target, call: EngineCall, reply: Reply) -> None:
        """Answer from this engine. Raises `NotServed`, or `ApiError` for what the engine refused or broke."""
        replica = target.replica_id
        if target.foreign and self.in_flight[replica] >= target.foreign.places:
            raise NotServed("full")
        self.in_flight[replica] += 1
        call.tally.replica = replica
        self.breaker.sent(replica, time.monotonic())
        try:
            await self._run(target, call, reply)
        except NotServed as not_served:
            if not_served.reason == "connect timeout":
                self.breaker.failed(replica, time.monotonic())
            elif not_served.told and not_served.told.retry_after_s:
                self.breaker.told(replica, time.monotonic() + not_served.told.retry_after_s)
            raise
        except ApiError as error:
            error.message = target.without_key(error.message)
            if error.blames if isinstance(error, _Late) else error.code == "engine_died":
                self.breaker.failed(replica, time.monotonic())
            raise
        else:
            self.breaker.worked(replica)
        finally:
            self.in_flight[replica] -= 1

    async def _run(self, target: Target, call: EngineCall, reply: Reply) -> None:
        watch = _Watch(call, reply)
        watch.raise_if_over()
        try:
            answer = await watch.first(self._upstream.post(target, call.path, call.headers, call.body))
        except (Unreachable, ConnectTimeout) as error:
            reason = "connect timeout" if isinstance(error, ConnectTimeout) else "unreachable"
            raise NotServed(reason, told=elsewhere(target)) from None
        except Broken as error:
            if error.idle:
                raise NotServed(str(error), died=True) from None
            raise broken(str(error)) from None
        with answer:
            if target.foreign:
                if told := refused_by(answer.status, answer.headers):
                    raise NotServed("refused", told=told)
            elif refusal := answer.headers.get(_REFUSAL):
                raise NotServed(refusal.decode())
            elif answer.status == 403:
                # Only a gate says this: another engine got the port of one that is gone.
                raise NotServed("stranger")
            if answer.status != 200:
                raise await engine_error(answer)
            if reply.stream:
                with watch:
                    await _relay_stream(answer, reply, call, watch, foreign=target.foreign is not None)
            else:
                await _relay_whole(answer, reply, call, watch)


async def _relay_whole(answer: Answer, reply: Reply, call: EngineCall, watch: _Watch) -> None:
    try:
        body = await watch.first(answer.read())
    except Broken as error:
        raise broken(str(error)) from None
    call.tally.whole(body)
    call.tally.over()
    await reply.whole(200, b"application/json", call.shape.whole(body))


class _Passing:
    """The events of one stream on their way: whole ones only, and what is to be done to them."""

    def __init__(self, call: EngineCall, dialect: Dialect) -> None:
        self._shape, self._tally, self._dialect = call.shape, call.tally, dialect
        self._rest = b""
        self._whole = b""
        self.fault: ApiError | None = None

    def take(self, chunk: bytes) -> bytes:
        """What the client gets of it. An error of the engine's is in `fault` then, and nothing follows it."""
        # Were half an event passed on and the engine died, no valid event could follow.
        self._whole, self._rest = whole, _ = _split(self._rest + chunk if self._rest else chunk)
        if (fault := whole.find(self._dialect.engine_error)) >= 0:
            self.fault = stream_error(whole[fault:])
            whole = whole[:fault]
        return self._shape.events(self._tally.events(whole))

    @property
    def complete(self) -> bool:
        """Whether it ended as streams end."""
        return not self._rest and self._dialect.ends(self._whole)


async def _relay_stream(answer: Answer, reply: Reply, call: EngineCall, watch: _Watch, *, foreign: bool) -> None:
    chunks: AsyncIterator[bytes] = ForeignStream(answer, call.path) if foreign else answer
    dialect = reply.dialect
    passing = _Passing(call, dialect)
    try:
        # No status before the engine's first event, or the first comment: what fails at its first step is then still
        # a status.
        watch.begin()
        chunk = await watch.first(_first_event(chunks))
        if isinstance(chunks, ForeignStream) and not chunks.differs:
            chunks = answer
        if _EVENT_END not in chunk or chunk.startswith(dialect.engine_end):
            raise broken("empty stream")
        if chunk.startswith(dialect.engine_error):
            raise stream_error(chunk)
        await watch.runs()
        await reply.start_stream()
        if reply.wire and chunks is answer:
            await _pour(chunk, answer, reply, reply.wire, passing, watch)
            chunk = b""
        while chunk:
            watch.engine_waits()
            await reply.chunk(passing.take(chunk))
            if passing.fault:
                raise passing.fault
            watch.client_waits()
            chunk = await anext(chunks, b"")
    except Broken as error:
        raise broken(str(error)) from None
    except asyncio.CancelledError:
        watch.raise_if_late()
        raise
    if not passing.complete:
        raise broken("cut stream")
    watch.stop()
    call.tally.over()
    await reply.end()


async def _pour(chunk: bytes, answer: Answer, reply: Reply, wire: Wire, passing: _Passing, watch: _Watch) -> None:
    """Pass on a stream from the engine's socket to the client's, without a task switch for its pieces."""

    def sink(data: bytes) -> None:
        takes_more = reply.write(passing.take(data))
        if passing.fault:
            raise passing.fault
        if takes_more:
            watch.client_waits()
        else:
            watch.engine_waits()
            answer.pause()

    def writable() -> None:
        watch.client_waits()
        answer.resume()

    wire.writable = writable
    try:
        sink(chunk)
        await answer.pour(sink)
    finally:
        wire.writable = None


async def _first_event(chunks: AsyncIterator[bytes]) -> bytes:
    """What came until the first event was whole, or all there is."""
    head = b""
    while _EVENT_END not in head and (chunk := await anext(chunks, b"")):
        head += chunk
    return head


def _split(data: bytes) -> tuple[bytes, bytes]:
    """The whole events, and the beginning of the next one."""
    if data.endswith(_EVENT_END):
        return data, b""
    end = data.rfind(_EVENT_END)
    end = end + len(_EVENT_END) if end >= 0 else 0
    return data[:end], data[end:]
