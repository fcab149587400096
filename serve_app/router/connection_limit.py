"""How many client connections one Router keeps open: where one more comes, the one idle for the longest goes."""

from __future__ import annotations

from typing import Protocol


class Closable(Protocol):
    """A connection."""

    def close_idle(self) -> None:
        """Close it; nothing is under way."""


class ConnectionLimit:
    """Of one event loop. Without it anybody, with no key, could open as many as there are files, and keep them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open = 0
        # In the order in which they became idle.
        self._idle: dict[Closable, None] = {}

    def opened(self, connection: Closable) -> bool:
        """Count one more, at the cost of one that idles where need be. False: all of them are busy."""
        self._open += 1
        if self._open > self._most:
            oldest = next(iter(self._idle), None)
            if oldest is None:
                return False
            del self._idle[oldest]
            oldest.close_idle()
        self._idle[connection] = None
        return True

    def busy(self, connection: Closable) -> None:
        """A request begins."""
        self._idle.pop(connection, None)

    def idle(self, connection: Closable) -> None:
        """Its requests are answered."""
        self._idle[connection] = None

    def closed(self, connection: Closable) -> None:
        """It is gone, however it went."""
        self._open -= 1
        self._idle.pop(connection, None)
