"""An engine in memory that does what a test tells it to; implements the `Engine` protocol."""

import asyncio

from serve_app.engines.base import Address, EngineError, EngineSpec, Phase


class ScriptedEngine:
    """Waits in `start` for `load` and in `stop` for `ended`; both are open unless a test clears them."""

    def __init__(self, model: str) -> None:
        self.spec = EngineSpec(model, "fake", "", {}, {}, 8)
        self.address = Address("127.0.0.1", 1)
        self.phase = Phase.STANDBY
        self.phase_seconds: dict[str, float] = {}
        self.in_flight = 0
        self.served = 0
        self.closed = False
        self.load = asyncio.Event()
        self.failure: Exception | None = None
        self.ended = asyncio.Event()
        self.ended.set()
        self.resists = False
        self.busy_once = False
        self.gone = asyncio.Event()
        self.stops = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.asked_to_close = asyncio.Event()

    async def start(self) -> None:
        self.phase = Phase.LOADING
        await self.load.wait()
        if self.failure:
            self.phase = Phase.STOPPED
            self.gone.set()
            raise self.failure
        self.phase = Phase.READY

    async def close_if_idle(self) -> bool:
        self.asked_to_close.set()
        if self.busy_once:
            # One request was there when it looked, and has ended since; nobody ever saw the count.
            self.busy_once = False
            self.served += 1
            return False
        if self.in_flight or self.gone.is_set():
            return False
        self.closed = True
        return True

    async def drain(self, timeout_s: float) -> bool:
        self.closed = True
        self.asked_to_close.set()
        try:
            async with asyncio.timeout(timeout_s):
                await self.idle.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self, grace_s: float) -> None:
        self.stops += 1
        await self.ended.wait()
        if self.resists:
            raise TimeoutError
        self.kill()

    def kill(self) -> None:
        self.phase, self.in_flight = Phase.STOPPED, 0
        self.gone.set()

    async def wait_exit(self) -> str:
        await self.gone.wait()
        return "it was killed"

    def memory_bytes(self) -> int:
        return 0 if self.gone.is_set() else 1

    # What a test does to it

    def begin(self, count: int = 1) -> None:
        self.in_flight += count
        self.idle.clear()

    def finish(self) -> None:
        self.in_flight -= 1
        self.served += 1
        if not self.in_flight:
            self.idle.set()


def failed(message: str) -> EngineError:
    """What a load that fails raises."""
    return EngineError(message)
