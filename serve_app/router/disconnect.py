"""Clients that leave before they have their answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work, but drop it at once when the client leaves; raises what the work raises."""
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
