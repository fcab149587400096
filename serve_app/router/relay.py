"""Moves one request to an engine and its answer back, as bytes. Nothing is done per chunk but passing it on."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import orjson

from serve_app.admission.breaker import Breaker
from serve_app.engines.base import REFUSAL_HEADER
from serve_app.errors import ApiError
from serve_app.models.replicas import Target
from serve_app.router.connection import Answer, Broken, UpstreamError
from serve_app.router.deadlines import Late, Watch
from serve_app.router.dialect import Dialect
from serve_app.router.engine_call import EngineCall
from serve_app.router.engine_errors import broken, engine_error, stream_error
from serve_app.router.foreign import ForeignStream, elsewhere, refused_by
from serve_app.router.reply import Reply
from serve_app.router.upstream import ConnectTimeout, Unreachable, Upstream
from serve_app.router.wire import Wire

_EVENT_END = b"\n\n"
_REFUSAL = REFUSAL_HEADER.lower().encode()


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
            if error.blames if isinstance(error, Late) else error.code == "engine_died":
                self.breaker.failed(replica, time.monotonic())
            raise
        else:
            self.breaker.worked(replica)
        finally:
            self.in_flight[replica] -= 1

    async def _run(self, target: Target, call: EngineCall, reply: Reply) -> None:
        watch = Watch(call, reply)
        with watch, await self._asked(target, call) as answer:
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
                await _relay_stream(answer, reply, call, watch, foreign=target.foreign is not None)
            else:
                await _relay_whole(answer, reply, call, watch)

    async def _asked(self, target: Target, call: EngineCall) -> Answer:
        try:
            return await self._upstream.post(target, call.path, call.headers, call.body)
        except (Unreachable, ConnectTimeout) as error:
            reason = "connect timeout" if isinstance(error, ConnectTimeout) else "unreachable"
            raise NotServed(reason, told=elsewhere(target)) from None
        except Broken as error:
            if error.idle:
                raise NotServed(str(error), died=True) from None
            raise broken(str(error)) from None


async def _relay_whole(answer: Answer, reply: Reply, call: EngineCall, watch: Watch) -> None:
    try:
        body = await answer.read()
    except Broken as error:
        raise broken(str(error)) from None
    watch.stop()
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
        if self._rest or not chunk.endswith(_EVENT_END):
            whole, self._rest = _split(self._rest + chunk)
        else:
            whole = chunk
        self._whole = whole
        if (fault := whole.find(self._dialect.engine_error)) >= 0:
            self.fault = stream_error(whole[fault:])
            whole = whole[:fault]
        return self._shape.events(self._tally.events(whole))

    @property
    def complete(self) -> bool:
        """Whether it ended as streams end."""
        return not self._rest and self._dialect.ends(self._whole)


async def _relay_stream(answer: Answer, reply: Reply, call: EngineCall, watch: Watch, *, foreign: bool) -> None:
    chunks: AsyncIterator[bytes] = ForeignStream(answer, call.path) if foreign else answer
    dialect = reply.dialect
    passing = _Passing(call, dialect)
    try:
        # No status before the engine's first event, or the first comment: what fails at its first step is then still
        # a status.
        watch.begin()
        chunk = await _first_event(chunks)
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
    if not passing.complete:
        raise broken("cut stream")
    watch.stop()
    call.tally.over()
    await reply.end()


async def _pour(chunk: bytes, answer: Answer, reply: Reply, wire: Wire, passing: _Passing, watch: Watch) -> None:
    """Pass on a stream from the engine's socket to the client's, without a task switch for its pieces."""

    write, take = wire.write, passing.take

    def sink(data: bytes) -> None:
        takes_more = write(events) if (events := take(data)) else True
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
    end = data.rfind(_EVENT_END)
    end = end + len(_EVENT_END) if end >= 0 else 0
    return data[:end], data[end:]
