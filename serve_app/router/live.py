"""The app behind a listener, exchanged as a whole where `user_config` changes: running requests keep theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from serve_app.router.app import RouterApp

# Makes the app of the newest configuration; it takes over from the one before.
NewApp = Callable[[RouterApp | None], RouterApp]


class LiveApp:
    """One ASGI app for one event loop. `exchange` may be called from any thread."""

    def __init__(self, new_app: NewApp) -> None:
        self._new_app = new_app
        self._app = new_app(None)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changing = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await self._app(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await self._app.close()
                await send({"type": "lifespan.shutdown.complete"})
                return
            self._loop = asyncio.get_running_loop()
            async with self._changing:
                await self._app.start()
            await send({"type": "lifespan.startup.complete"})

    async def exchange(self) -> None:
        """Serve new requests by the newest configuration from now on."""
        if self._loop is None:
            # Nobody was served yet.
            self._app = self._new_app(None)
            return
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._exchange(), self._loop))

    async def _exchange(self) -> None:
        async with self._changing:
            before = self._app
            app = self._new_app(before)
            await before.hand_over()
            await app.start()
            self._app = app
