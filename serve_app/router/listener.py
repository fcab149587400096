"""The front door: the Router replica's own HTTP listener, on an event loop and thread of its own.

Serve's Python proxy would cost 11 ms of CPU a request and another hop a token (docs/architecture.md). So the
duties of a front door are ours: share the port between replicas of one node, say clearly when somebody else
has it, stop accepting and finish what runs on shutdown.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import http.client
import json
import logging
import math
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import uvicorn
import uvloop
from starlette.types import ASGIApp

from serve_app.router.connection_limit import ConnectionLimit
from serve_app.router.protocol import FrontDoorProtocol
from serve_app.service_schema import RouterSettings

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 2.0
_PROBES = 3
_START_WAIT_S = 5.0
_SILENT = "silent"
# Ray's, logs, idle connections.
_OTHER_FILES = 256


class PortTaken(Exception):
    """Somebody else listens on the front door's port. The message is for the operator."""


class _Server(uvicorn.Server):
    """A server that leaves the process's signals to Ray, and loses no connection that the kernel took for it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Uvicorn's. With its socket the kernel would reset the connections that nobody has accepted yet."""
        waiting = [connection for sock in sockets or [] for connection in _accepted(sock)]
        for server in self.servers:
            server.close()
        for connection in waiting:
            await asyncio.get_running_loop().connect_accepted_socket(self._new_protocol, connection)
        await super().shutdown(sockets)

    def _new_protocol(self) -> asyncio.Protocol:
        new: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        return new(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


def _accepted(sock: socket.socket) -> Iterator[socket.socket]:
    with contextlib.suppress(BlockingIOError):
        while True:
            yield sock.accept()[0]


class Listener:
    """Serves `app` (made in the listener's own loop by `new_app`) from `start` to `stop`."""

    def __init__(self, settings: RouterSettings, new_app: Callable[[], ASGIApp], identity: str) -> None:
        self._settings = settings
        self._new_app = new_app
        files = raise_file_limit(settings.max_in_flight)
        # Each request in flight has a connection to its engine besides.
        own = max(files // 2, files - settings.max_in_flight) - _OTHER_FILES
        self._most_connections = max(1, min(settings.max_connections, own))
        self._socket = open_port(settings.host, settings.port, identity)
        self._server: _Server | None = None
        self._serving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="front-door", daemon=True)
        # From then on `/ready` says no, and whoever comes is served nevertheless.
        self.leaving = False

    def start(self) -> None:
        """Begin to accept connections."""
        self._thread.start()

    def alive(self) -> bool:
        """Whether the front door still serves."""
        return self._thread.is_alive()

    async def stop(self) -> None:
        """Say for `leave_s` that it goes, then accept nothing more, finish what runs within `drain_s`, and end."""
        await asyncio.to_thread(self._serving.wait, _START_WAIT_S)
        self.leaving = True
        await asyncio.sleep(self._settings.leave_s)
        if self._server:
            self._server.should_exit = True
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        uvloop.run(self._serve())

    async def _serve(self) -> None:
        config = uvicorn.Config(
            self._new_app(),
            http=cast(Any, functools.partial(FrontDoorProtocol, limit=ConnectionLimit(self._most_connections))),
            ws="none",
            lifespan="on",
            access_log=False,
            # Its own would close every handler of the process, Serve's too. Serve's controller (2.60), when it comes
            # back on a new head, asks each replica where it logs, and replaced all Routers: they could not say.
            log_config=None,
            log_level="warning",
            timeout_keep_alive=self._settings.keep_alive_s,
            timeout_graceful_shutdown=math.ceil(self._settings.drain_s),
            backlog=2048,
            server_header=False,
            proxy_headers=False,
        )
        self._server = _Server(config)
        self._serving.set()
        await self._server.serve(sockets=[self._socket])


def raise_file_limit(max_in_flight: int) -> int:
    """Let this process open as many files as it may: a request in flight takes two, the usual limit is 1024.

    Returns how many that are.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft < hard:
        # Linux takes no more than fs.nr_open, 2^20 unless it was changed.
        wanted = max(soft, 1 << 20) if hard == resource.RLIM_INFINITY else hard
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if soft < 2 * max_in_flight + _OTHER_FILES:
        logger.warning(
            "this process may open %d files, too few for router.max_in_flight: %d; lower that, or raise `ulimit -Hn`",
            soft,
            max_in_flight,
        )
    return soft


def open_port(host: str, port: int, identity: str) -> socket.socket:
    """Bind the front door's port so that other replicas of this service on the node can share it.

    The kernel lets every process of one user share a port that was bound to be shared, also one of another
    Switchyard; so whoever answers there is asked who it is. Raises `PortTaken`.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    taken = f"port {port} on {host} is in use by another program; stop it, or set router.port to a free one"
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(taken) from None
        raise PortTaken(f"cannot listen on {host}:{port}: {error.strerror}") from None
    # A neighbour under load may be slow to answer; a stranger is one who answers wrongly, or never.
    for _ in range(_PROBES):
        neighbour = _who_answers(host, port)
        if neighbour in (None, identity):
            return sock
        if neighbour != _SILENT:
            break
    sock.close()
    raise PortTaken(taken)


def _who_answers(host: str, port: int) -> str | None:
    """The identity of the Switchyard that listens there; None if nobody does, a word if it is something else."""
    where = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    connection = http.client.HTTPConnection(where, port, timeout=_PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        answer = json.loads(connection.getresponse().read(4096))
        return str(answer.get("service", "stranger"))
    except ConnectionRefusedError:
        return None
    except TimeoutError:
        return _SILENT
    except (OSError, http.client.HTTPException, ValueError, AttributeError):
        return "stranger"
    finally:
        connection.close()
