"""A client's connection, for what ASGI has no words for: to write without a task switch, to hear that it is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

# In the scope of a request: its `Wire`. What looks at an answer on its way takes it out.
WIRE = "switchyard.wire"


class Wire(Protocol):
    """The connection of one request whose answer is a stream, once its headers are sent."""

    left: Callable[[], None] | None
    writable: Callable[[], None] | None
    closing: Callable[[], None] | None
    closes: bool

    @property
    def has_all(self) -> bool:
        """Whether the whole body of the request has come."""

    @property
    def open(self) -> bool:
        """Whether the client is still there. When it leaves, `left` is called.

        `closing` is called when the front door closes and waits for answers to end; from then on it `closes`.
        """

    def write(self, data: bytes) -> bool:
        """Send a piece of the body. False: the client takes no more for now; `writable` is called when it does."""
