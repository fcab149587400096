"""Clients that leave before they have their answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive

from serve_app.router.wire import Wire


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


async def while_connected(wire: Wire | None, receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work, but drop it at once when the client leaves; raises what the work raises, or `ClientGone`."""
    if wire is None:
        await _while_heard(receive, work)
        return
    if not wire.open:
        work.close()
        raise ClientGone
    task = asyncio.current_task()
    assert task
    gone = False

    def left() -> None:
        nonlocal gone
        gone = True
        task.cancel()

    wire.left = left
    try:
        await work
    except asyncio.CancelledError:
        if gone and task.cancelling() == 1:
            raise ClientGone from None
        raise  # the router shuts down in the same moment
    finally:
        wire.left = None
        if gone:
            # Whatever the work made of it.
            task.uncancel()


async def _while_heard(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """The same where only ASGI's own messages tell: at the price of two tasks."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait([doing, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientGone
        doing.result()
    finally:
        leaving.cancel()
        if not doing.done():
            doing.cancel()
            await asyncio.wait([doing])


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
