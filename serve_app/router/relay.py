"""Moves one request to an engine and its answer back, as bytes. Nothing is done per chunk but passing it on."""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any, TypeVar

import aiohttp
import orjson

from serve_app.admission.breaker import Breaker
from serve_app.engines.base import REFUSAL_HEADER
from serve_app.errors import ApiError
from serve_app.models.replicas import Target
from serve_app.router.engine_errors import broken, engine_error, stream_error
from serve_app.router.foreign import ForeignStream, elsewhere, refused_by
from serve_app.router.reply import Reply
from serve_app.router.shape import Shape
from serve_app.router.tally import Tally

_EVENT_END = b"\n\n"
_STREAM_END = b"data: [DONE]\n\n"
_STREAM_ERROR = b'data: {"error"'
_NOT_BEGUN = "It was not begun to be answered"
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True)
class EngineCall:
    """One request as an engine gets it, and what is done to its answer. Times in seconds; None: no limit.

    `began`: when the client's request came (`time.monotonic`), from which `ttft_s` and `total_s` count.
    """

    path: str
    body: bytes
    headers: Mapping[str, str]
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


@dataclasses.dataclass(slots=True)
class _Connection:
    reused: bool = False


async def _mark_reused(session: object, context: Any, params: object) -> None:
    context.trace_request_ctx.reused = True


class Relay:
    """The connections to all engines, pooled and kept alive, and how many requests run on each replica."""

    def __init__(self, connect_timeout_s: float) -> None:
        self.in_flight: Counter[str] = Counter()
        self.breaker = Breaker()
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s)
        self._session: aiohttp.ClientSession | None = None
        self._trace = aiohttp.TraceConfig()
        self._trace.on_connection_reuseconn.append(_mark_reused)

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60, ttl_dns_cache=300)
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=self._timeout,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                trace_configs=[self._trace],
            )
        return self._session

    async def close(self) -> None:
        """Close every connection."""
        if self._session:
            await self._session.close()

    async def healthy(self, target: Target, timeout_s: float) -> bool:
        """Whether the engine says that it is alive."""
        return await self.probe(target, "/health", timeout_s) == 200

    async def probe(self, target: Target, path: str, timeout_s: float) -> int:
        """The status with which one of its paths answers; 0 where nothing does."""
        try:
            async with self._client().get(
                target.at(path),
                headers=target.credentials,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
                ssl=_tls(target),
                trace_request_ctx=_Connection(),
            ) as response:
                return response.status
        except (aiohttp.ClientError, TimeoutError):
            return 0

    async def call(self, target: Target, path: str, body: bytes) -> dict[str, Any]:
        """One small request of the Router's own. Raises `aiohttp.ClientError`, or `ApiError` for a refusal."""
        async with await self._post(target, path, body, {}, _Connection()) as response:
            if response.status != 200:
                raise await engine_error(response)
            answer: dict[str, Any] = orjson.loads(await response.read())
            return answer

    async def _post(
        self, target: Target, path: str, body: bytes, headers: Mapping[str, str], connection: _Connection
    ) -> aiohttp.ClientResponse:
        """Send it. No redirect is followed: it could lead anywhere, with our key and the client's prompt."""
        foreign = target.foreign
        timeout = aiohttp.ClientTimeout(sock_connect=foreign.connect_timeout_s) if foreign else self._timeout
        return await self._client().post(
            target.at(path),
            data=body,
            headers={**headers, **target.credentials, "content-type": "application/json"},
            timeout=timeout,
            allow_redirects=False,
            ssl=_tls(target),
            trace_request_ctx=connection,
        )

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
        connection = _Connection()
        watch = _Watch(call, reply)
        watch.raise_if_over()
        try:
            response = await watch.first(self._post(target, call.path, call.body, call.headers, connection))
        except aiohttp.ClientConnectorError:
            raise NotServed("unreachable", told=elsewhere(target)) from None
        except (aiohttp.ServerTimeoutError, TimeoutError):
            raise NotServed("connect timeout", told=elsewhere(target)) from None
        except aiohttp.ClientError as error:
            if connection.reused:
                raise NotServed(type(error).__name__, died=True) from None
            raise broken(type(error).__name__) from None
        async with response:
            if target.foreign:
                if told := refused_by(response.status, response.headers):
                    raise NotServed("refused", told=told)
            elif refusal := response.headers.get(REFUSAL_HEADER):
                raise NotServed(refusal)
            elif response.status == 403:
                # Only a gate says this: another engine got the port of one that is gone.
                raise NotServed("stranger")
            if response.status != 200:
                raise await engine_error(response)
            if reply.stream:
                with watch:
                    await _relay_stream(response, reply, call, watch, foreign=target.foreign is not None)
            else:
                await _relay_whole(response, reply, call, watch)


async def _relay_whole(response: aiohttp.ClientResponse, reply: Reply, call: EngineCall, watch: _Watch) -> None:
    try:
        body = await watch.first(response.read())
    except aiohttp.ClientError as error:
        raise broken(type(error).__name__) from None
    call.tally.whole(body)
    call.tally.over()
    await reply.whole(200, b"application/json", call.shape.whole(body))


async def _relay_stream(
    response: aiohttp.ClientResponse, reply: Reply, call: EngineCall, watch: _Watch, *, foreign: bool
) -> None:
    chunks: AsyncIterator[bytes] = response.content.iter_any()
    if foreign:
        chunks = ForeignStream(chunks, call.path)
    shape, tally = call.shape, call.tally
    try:
        # No status before the engine's first event, or the first comment: what fails at its first step is then still
        # a status.
        watch.begin()
        chunk = await watch.first(_first_event(chunks))
        if isinstance(chunks, ForeignStream) and not chunks.differs:
            chunks = chunks.chunks
        if _EVENT_END not in chunk or chunk.startswith(_STREAM_END):
            raise broken("empty stream")
        if chunk.startswith(_STREAM_ERROR):
            raise stream_error(chunk)
        await watch.runs()
        await reply.start_stream()
        whole = rest = b""
        while chunk:
            watch.engine_waits()
            # Whole events only: were half of one passed on and the engine died, no valid event could follow.
            whole, rest = _split(rest + chunk if rest else chunk)
            if (fault := whole.find(_STREAM_ERROR)) >= 0:
                await reply.chunk(shape.events(tally.events(whole[:fault])))
                raise stream_error(whole[fault:])
            await reply.chunk(shape.events(tally.events(whole)))
            watch.client_waits()
            chunk = await anext(chunks, b"")
    except aiohttp.ClientError as error:
        raise broken(type(error).__name__) from None
    except asyncio.CancelledError:
        watch.raise_if_late()
        raise
    if rest or not whole.endswith(_STREAM_END):
        raise broken("cut stream")
    watch.stop()
    tally.over()
    await reply.end()


def _tls(target: Target) -> ssl.SSLContext | bool:
    return (target.foreign.tls if target.foreign else None) or True


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
