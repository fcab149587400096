"""A way to a service that can be cut and mended: to whoever comes by it the server is gone, and back."""

from __future__ import annotations

import contextlib
import socket
import threading

_PIECE = 65536


class Wire:
    """Listens on `port` and passes on to `target`, both on this machine."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._sockets: set[socket.socket] = set()
        self._listener = self._open(0)
        self.port = int(self._listener.getsockname()[1])

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()

    def cut(self) -> None:
        """End all connections, and refuse new ones."""
        for each in (self._listener, *tuple(self._sockets)):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._sockets.clear()

    def mend(self) -> None:
        """Listen again at the same address."""
        self._listener = self._open(self.port)

    def _open(self, port: int) -> socket.socket:
        listener = socket.create_server(("127.0.0.1", port), backlog=64)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return listener

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets |= {client, server}
                for source, sink in ((client, server), (server, client)):
                    source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_PIECE):
                sink.sendall(piece)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
            self._sockets.discard(each)
