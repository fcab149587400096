"""The port of an engine, kept while its hosts come and go."""

from __future__ import annotations

import socket

from serve_app.engines.base import Address


def reserve_port(host: str) -> tuple[Address, socket.socket]:
    """A port that stays ours while the returned socket lives, though nothing answers on it until a host listens.

    The socket is bound and never listens; hosts share the port (`SO_REUSEPORT`) one after the other. So a
    model keeps its address over restarts, and a stopped one refuses connections at once.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    # Not SO_REUSEADDR: with it the kernel may choose the same port twice while nobody listens on it.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind((host, 0))
    return Address(host, sock.getsockname()[1]), sock
