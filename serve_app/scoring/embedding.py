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

_RESTART_PAUSE_S = 5.0
# Questions that wait for the one process; beyond them a deadline could only pass.
_MAX_WAITING = 8


class EmbeddingScorer:
    """One process, one question at a time."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._process: asyncio.subprocess.Process | None = None
        self._settings: dict[str, float] | None = None
        self._running: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._is_ready = asyncio.Event()
        self._waiting = 0
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
        while True:
            try:
                await self._run()
            except Exception:
                logger.exception("the scorer's process cannot be talked to")
            finally:
                self._settings = None
                process, self._process = self._process, None
                if process and process.returncode is None:
                    process.kill()
                for waiting in self._answers.values():
                    if not waiting.done():
                        waiting.set_exception(RuntimeError("the scorer's process ended"))
                self._answers.clear()
            logger.warning("the scorer's process ended; it is started again")
            await asyncio.sleep(_RESTART_PAUSE_S)

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
        if settings is None or process is None or process.stdin is None or self._waiting >= _MAX_WAITING:
            raise NotReady
        self._waiting += 1
        try:
            async with self._turn:
                answer = await self._ask(process.stdin, excerpt)
        finally:
            self._waiting -= 1
        return mixed(answer, shipped_lexicon().score(excerpt), settings)

    async def _ask(self, stdin: asyncio.StreamWriter, excerpt: Excerpt) -> dict[str, Any]:
        self._next_id += 1
        number = self._next_id
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        question = {"id": number, "parts": dataclasses.asdict(parts_of(excerpt))}
        stdin.write(orjson.dumps(question) + b"\n")
        with contextlib.ExitStack() as stack:
            stack.callback(self._answers.pop, number, None)
            found: dict[str, Any] = await answer
            return found


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
