"""The embedding scorer, seen from the Router: asks its process, mixes in the lexical score."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import sys
from typing import Any

import orjson

from serve_app.routing.excerpt import Excerpt
from serve_app.routing.lexical import Score, shipped_lexicon
from serve_app.scoring.guard import NotReady
from serve_app.scoring.sequence import parts_of

logger = logging.getLogger(__name__)

_RESTART_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 60.0
# What one question is thought to take until some were answered, and how quickly that is corrected.
_FIRST_GUESS_S = 0.02
_CORRECTION = 0.2


class EmbeddingScorer:
    """One process, one question at a time. What could not be answered within `deadline_s` is not even asked."""

    def __init__(self, threads: int, deadline_s: float = math.inf) -> None:
        self._threads = threads
        self._deadline_s = deadline_s
        self._usual_s = _FIRST_GUESS_S
        self._asking: set[asyncio.Task[dict[str, Any]]] = set()
        self._process: asyncio.subprocess.Process | None = None
        self._settings: dict[str, float] | None = None
        self._running: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._is_ready = asyncio.Event()
        self._next_id = 0

    async def start(self) -> None:
        """Begin to start the process, and keep it running."""
        if self._running is None:
            self._running = asyncio.create_task(self._keep_running())

    async def ready(self) -> None:
        """Wait until the process answers for the first time."""
        await self._is_ready.wait()

    async def close(self) -> None:
        """End the process."""
        if self._running:
            self._running.cancel()
            await asyncio.wait([self._running])
            self._running = None

    async def _keep_running(self) -> None:
        pause_s = _RESTART_PAUSE_S
        while True:
            try:
                await self._run()
            except Exception:
                logger.exception("the scorer's process cannot be talked to")
            finally:
                self._settings = None
                process, self._process = self._process, None
                if process:
                    await _ended(process)
                for waiting in self._answers.values():
                    if not waiting.done():
                        waiting.set_exception(RuntimeError("the scorer's process ended"))
                self._answers.clear()
            logger.warning("the scorer's process ended; it is started again in %g s", pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _run(self) -> None:
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "serve_app.scoring.worker",
            str(self._threads),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout
        async for line in process.stdout:
            message = orjson.loads(line)
            if "ready" in message:
                self._settings = message["ready"]
                self._is_ready.set()
            elif (waiting := self._answers.pop(message["id"], None)) and not waiting.done():
                waiting.set_result(message)

    async def score(self, excerpt: Excerpt, body: dict[str, Any]) -> Score:
        """Ask the process. Raises `NotReady` while it starts or is too busy."""
        await self.start()
        settings, process = self._settings, self._process
        busy = (len(self._asking) + 1) * self._usual_s > self._deadline_s
        if settings is None or process is None or process.stdin is None or (busy and self._asking):
            raise NotReady
        asking = asyncio.create_task(self._ask(process.stdin, excerpt))
        self._asking.add(asking)
        asking.add_done_callback(self._answered)
        # Who asked may give up; the process still answers, and the next question waits for that.
        answer = await asyncio.shield(asking)
        return mixed(answer, shipped_lexicon().score(excerpt), settings)

    def _answered(self, asking: asyncio.Task[dict[str, Any]]) -> None:
        self._asking.discard(asking)
        if not asking.cancelled() and asking.exception() is None:
            self._usual_s += _CORRECTION * (asking.result()["s"] - self._usual_s)

    async def _ask(self, stdin: asyncio.StreamWriter, excerpt: Excerpt) -> dict[str, Any]:
        async with self._turn:
            self._next_id += 1
            number = self._next_id
            answer = self._answers[number] = asyncio.get_running_loop().create_future()
            question = {"id": number, "parts": dataclasses.asdict(parts_of(excerpt))}
            stdin.write(orjson.dumps(question) + b"\n")
            with contextlib.ExitStack() as stack:
                stack.callback(self._answers.pop, number, None)
                found: dict[str, Any] = await answer
                return found


async def _ended(process: asyncio.subprocess.Process) -> None:
    """End a process and its pipes: what is left of them must not outlive the event loop."""
    if process.stdin:
        process.stdin.close()
    if process.returncode is None:
        process.kill()
    await process.wait()


def mixed(answer: dict[str, Any], words: Score, settings: dict[str, float]) -> Score:
    """The encoder's logits and the lexical ones, weighted as out-of-fold predictions were fitted."""

    def probability(name: str, lexical: float) -> float:
        value = settings[f"{name}_encoder"] * answer[name] + settings[f"{name}_bias"]
        value += settings[f"{name}_lexical"] * math.log(lexical / (1 - lexical))
        return 1 / (1 + math.exp(-max(-30.0, min(30.0, value))))

    return Score(
        think=probability("think", words.think),
        large=probability("large", words.large),
        think_at=settings["think_at"],
        small_below=settings["large_at"],
        kind="embedding",
    )
