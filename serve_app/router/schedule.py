"""Has lazy models loaded before anybody asks: at the start, and by a table of times."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from cronsim import CronSim

from serve_app.errors import ApiError
from serve_app.model_schema import Model
from serve_app.residency.events import Order
from serve_app.router.fleet import Fleet

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 15.0


def due(models: Iterable[Model], after: datetime, until: datetime) -> list[Model]:
    """The models whose `warm_at` names a time after the one and not after the other. Pure."""
    return [model for model in models if any(_names(line, after, until) for line in model.warm_at)]


def _names(line: str, after: datetime, until: datetime) -> bool:
    # In UTC: Python compares the wall clocks of one zone, and those come twice when its clocks go back.
    first, last = after.astimezone(UTC), until.astimezone(UTC)
    for time in CronSim(line, after):
        if time.astimezone(UTC) > last:
            return False
        if time.astimezone(UTC) > first:
            return True
    return False


class Schedule:
    """Runs in every Router replica; the pool joins what several of them ask for at once."""

    def __init__(
        self,
        models: Iterable[Model],
        fleet: Fleet,
        timezone: str,
        *,
        now: Callable[[ZoneInfo], datetime] = datetime.now,
    ) -> None:
        self._models = [model for model in models if model.preload or model.warm_at]
        self._fleet = fleet
        self._zone = ZoneInfo(timezone)
        self._now = now
        self._was_there: set[str] = set()

    async def run(self) -> None:
        """Look again and again; returns at once where there is nothing to do."""
        seen = self._now(self._zone) - timedelta(seconds=1)
        while self._models:
            now = self._now(self._zone)
            for model in {model.id: model for model in (*self._preloads(), *due(self._models, seen, now))}.values():
                await self._load(model)
            seen = now
            await asyncio.sleep(_LOOK_EVERY_S)

    def _preloads(self) -> Iterable[Model]:
        """Those that no replica has loaded yet: after the start, and after a replica was replaced."""
        for model in self._models:
            status = self._fleet.status(model)
            if status.loads:
                self._was_there.add(model.id)
            # A pool that has gone to zero since stays there until somebody asks.
            rests = model.id in self._was_there and self._fleet.empty(model)
            if model.preload and status.state == "stopped" and not status.loads and not rests:
                yield model

    async def _load(self, model: Model) -> None:
        try:
            await self._fleet.order(model, Order.LOAD)
        except ApiError as error:
            logger.warning("%s could not be loaded ahead: %s", model.id, error.message)
