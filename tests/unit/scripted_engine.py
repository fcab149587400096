"""An engine in memory that does what a test tells it to; implements the `Engine` protocol."""

import asyncio
import threading

from serve_app.engines.base import Address, EngineError, EngineLoad, EngineSpec, Phase, StuckError


class ScriptedEngine:
    """Waits in `start` for `load`, in `sleep` for `nods_off`, and so on; all but `load` are set until a test clears
    them. One that hangs is ended by its process after a time: `kill` is that, too."""

    def __init__(self, model: str) -> None:
        self.spec = EngineSpec(model, "fake", "", {}, {}, 8)
        self.address = Address("127.0.0.1", 1)
        self.phase = Phase.STANDBY
        self.phase_seconds: dict[str, float] = {}
        self.in_flight = 0
        self.served = 0
        self.reported = EngineLoad()
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
        self.looks = asyncio.Event()
        self.looks.set()
        self.nods_off = asyncio.Event()
        self.nods_off.set()
        self.sleep_failure: Exception | None = None
        self.levels: list[int] = []
        self.rises = asyncio.Event()
        self.rises.set()
        self.wake_failure: Exception | None = None
        self.wakes = 0
        self.measured = threading.Event()
        self.measured.set()

    async def start(self) -> None:
        self.phase = Phase.LOADING
        try:
            await self.load.wait()
        except asyncio.CancelledError:
            if self.resists:
                raise StuckError("it resists") from None
            self.kill()
            raise
        if self.failure:
            self.phase = Phase.STOPPED
            self.gone.set()
            raise self.failure
        self.phase = Phase.READY

    async def close_if_idle(self) -> bool:
        self.asked_to_close.set()
        await self.looks.wait()
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

    async def sleep(self, level: int) -> None:
        if self.phase is not Phase.READY:
            raise EngineError("it is not running")
        assert self.closed
        assert not self.in_flight
        self.phase = Phase.ASLEEP
        self.levels.append(level)
        await self._steered(self.nods_off, self.sleep_failure)

    async def wake(self) -> None:
        if self.phase is not Phase.ASLEEP:
            raise EngineError("it is not asleep")
        self.wakes += 1
        await self._steered(self.rises, self.wake_failure)
        self.phase, self.closed = Phase.READY, False

    async def _steered(self, done: asyncio.Event, failure: Exception | None) -> None:
        ends = [asyncio.ensure_future(event.wait()) for event in (done, self.gone)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        if self.gone.is_set():
            raise EngineError("it was killed")
        if failure:
            raise failure

    async def stop(self, grace_s: float) -> None:
        self.stops += 1
        await self.ended.wait()
        if self.resists:
            raise StuckError("it resists")
        self.kill()

    def kill(self) -> None:
        self.phase, self.in_flight = Phase.STOPPED, 0
        self.gone.set()

    async def wait_exit(self) -> str:
        await self.gone.wait()
        return "it was killed"

    def memory_bytes(self) -> int:
        self.measured.wait()
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
