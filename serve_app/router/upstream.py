"""The connections to engines, kept alive and pooled."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import ssl
from collections.abc import Mapping
from urllib.parse import urlsplit

from serve_app.models.replicas import Target
from serve_app.router.connection import Answer, UpstreamError

_KEEP_ALIVE_S = 60.0


class Unreachable(UpstreamError):
    """No connection could be made."""


class ConnectTimeout(UpstreamError):
    """No connection was made in time."""


@dataclasses.dataclass(eq=False, slots=True)
class _Origin:
    """Where a URL leads, and the connections that wait there. `host`: the header's value; `root`: before every path."""

    address: str
    port: int
    tls: ssl.SSLContext | None
    host: bytes
    root: str
    idle: list[Answer] = dataclasses.field(default_factory=list)

    def forget(self, connection: Answer) -> None:
        """It is gone."""
        if connection in self.idle:
            self.idle.remove(connection)


class Upstream:
    """The pool of connections, by where they lead. `connect_timeout_s` holds where a target says nothing."""

    def __init__(self, connect_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._origins: dict[tuple[str, ssl.SSLContext | None], _Origin] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    async def post(self, target: Target, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Send a JSON body, on an idle connection where there is one; the answer's headers have come.

        No redirect is followed: it could lead anywhere, with our key and the client's prompt. Raises `UpstreamError`.
        """
        return await self._send(target, b"POST", path, {**headers, "content-type": "application/json"}, body)

    async def get(self, target: Target, path: str) -> Answer:
        """As `post`, without a body."""
        return await self._send(target, b"GET", path, {}, b"")

    async def close(self) -> None:
        """Close every idle connection, and keep no other."""
        self._closed = True
        if self._sweeper:
            self._sweeper.cancel()
        for origin in self._origins.values():
            while origin.idle:
                origin.idle.pop().drop()

    def keep(self, origin: _Origin, connection: Answer) -> None:
        """Take a connection back whose answer is complete."""
        if self._closed:
            connection.drop()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        origin.idle.append(connection)
        if self._sweeper is None:
            self._sweeper = loop.call_later(_KEEP_ALIVE_S, self._sweep)

    async def _send(self, target: Target, method: bytes, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        foreign = target.foreign
        origin = self._origins.get((target.url, foreign.tls if foreign else None)) or self._origin(target)
        if origin.idle:
            answer = origin.idle.pop()
        else:
            answer = await self._connect(origin, foreign.connect_timeout_s if foreign else self._connect_timeout_s)
        lines = [b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (method, (origin.root + target.path(path)).encode(), origin.host)]
        if foreign:
            # Without it any coding may be used (RFC 9110 §12.5.3), and what we pass on is text.
            lines.append(b"accept-encoding: identity\r\n")
        for name, value in {**headers, **target.credentials}.items():
            lines.append(f"{name}: {value}\r\n".encode("latin-1"))
        lines.append(b"content-length: %d\r\n\r\n" % len(body) if method == b"POST" else b"\r\n")
        lines.append(body)
        await answer.asked(b"".join(lines))
        return answer

    async def _connect(self, origin: _Origin, timeout_s: float) -> Answer:
        loop = asyncio.get_running_loop()
        keep = functools.partial(self.keep, origin)
        try:
            async with asyncio.timeout(timeout_s):
                _, answer = await loop.create_connection(
                    lambda: Answer(keep, origin.forget), origin.address, origin.port, ssl=origin.tls
                )
        except TimeoutError:
            raise ConnectTimeout("connect timeout") from None
        except OSError as error:
            raise Unreachable(type(error).__name__) from None
        return answer

    def _origin(self, target: Target) -> _Origin:
        parts = urlsplit(target.url)
        secure = parts.scheme == "https"
        own = target.foreign.tls if target.foreign else None
        tls = (own or ssl.create_default_context()) if secure else None
        host = parts.netloc.rpartition("@")[2].encode()
        origin = _Origin(parts.hostname or "", parts.port or (443 if secure else 80), tls, host, parts.path.rstrip("/"))
        self._origins[target.url, own] = origin
        return origin

    def _sweep(self) -> None:
        """Drop what has been idle for long."""
        loop = asyncio.get_running_loop()
        self._sweeper = None
        past = loop.time() - _KEEP_ALIVE_S
        for origin in self._origins.values():
            for connection in [each for each in origin.idle if each.idle_since <= past]:
                origin.idle.remove(connection)
                connection.drop()
        if any(origin.idle for origin in self._origins.values()):
            self._sweeper = loop.call_later(_KEEP_ALIVE_S / 2, self._sweep)
