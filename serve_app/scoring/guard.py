"""What holds for every scorer: a deadline, a memory of recent answers, and rest after failures.

A scorer that is late or broken costs a request its deadline at most, then nothing: the lexical score decides.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

from serve_app.routing.excerpt import Excerpt
from serve_app.routing.lexical import Score
from serve_app.routing_schema import Scorer as Settings

logger = logging.getLogger(__name__)


class NotReady(Exception):
    """The scorer is still starting; this is no failure."""


class Scorer(Protocol):
    """Judges an excerpt. Raises anything at all where it cannot. `body` is the checked chat body."""

    async def score(self, excerpt: Excerpt, body: dict[str, Any]) -> Score:
        """The score."""
        ...

    async def start(self) -> None:
        """Get ready; called before the first request."""
        ...

    async def close(self) -> None:
        """Let go of processes and connections."""
        ...


class Guarded:
    """A scorer within its bounds. `late`, `failed`, `cached` count what became of the questions."""

    def __init__(self, scorer: Scorer, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._scorer = scorer
        self._settings = settings
        self._clock = clock
        self._known: OrderedDict[bytes, Score] = OrderedDict()
        self._failures = 0
        self._rests_until = 0.0
        self.late = self.failed = self.cached = 0

    async def start(self) -> None:
        """Get the scorer ready."""
        await self._scorer.start()

    async def close(self) -> None:
        """Let go of what the scorer holds."""
        await self._scorer.close()

    async def score(self, excerpt: Excerpt, body: dict[str, Any]) -> Score | None:
        """The score, or None where there is none in time."""
        key = _key(excerpt)
        if known := self._known.get(key):
            self._known.move_to_end(key)
            self.cached += 1
            return known
        if self._clock() < self._rests_until:
            return None
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                score = await self._scorer.score(excerpt, body)
        except NotReady:
            return None
        except TimeoutError:
            self.late += 1
            self._failed("late")
            return None
        except Exception as error:
            self.failed += 1
            self._failed(type(error).__name__)
            return None
        self._failures = 0
        if self._settings.cache_entries:
            self._known[key] = score
            if len(self._known) > self._settings.cache_entries:
                self._known.popitem(last=False)
        return score

    def _failed(self, how: str) -> None:
        self._failures += 1
        if self._failures >= self._settings.breaker_failures:
            self._failures = 0
            self._rests_until = self._clock() + self._settings.breaker_s
            logger.warning("the scorer rests for %g s: %s", self._settings.breaker_s, how)


def _key(excerpt: Excerpt) -> bytes:
    parts = (excerpt.ask, excerpt.before, excerpt.reply, excerpt.system, excerpt.tool_names)
    return hashlib.blake2b(repr(parts).encode("utf-8", "replace"), digest_size=16).digest()
