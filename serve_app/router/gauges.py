"""How a Router is at this moment, in metrics. Read by the thread that hands them on; it changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from serve_app.batches.runner import Runner
from serve_app.catalog import Catalog
from serve_app.router.fleet import Fleet
from serve_app.router.lines import Line
from serve_app.router.relay import Relay
from serve_app.telemetry import metric_table as table
from serve_app.telemetry.meters import Meters


class Gauges:
    """Of one app: `open_requests` tells how many it has. `runner` and external servers are the front door's only."""

    def __init__(
        self,
        catalog: Catalog,
        fleet: Fleet,
        relay: Relay,
        lines: Mapping[str, Line],
        open_requests: Callable[[], int],
        *,
        runner: Runner | None,
        front_door: bool,
    ) -> None:
        self._catalog = catalog
        self._fleet = fleet
        self._relay = relay
        self._lines = lines
        self._open_requests = open_requests
        self._runner = runner if front_door else None
        self._front_door = front_door

    def __call__(self, meters: Meters) -> None:
        """See `RouterMetrics.watch`."""
        meters.gauge(table.OPEN, (), self._open_requests())
        meters.gauge(table.SHUNNED, (), len(self._relay.breaker.shunned(time.monotonic())))
        for model in self._catalog.models.values():
            if queued := len(self._lines[model.id]):
                meters.gauge(table.QUEUED, (model.id,), queued)
            if held := self._fleet.cold.waiting(model.id):
                meters.gauge(table.HELD, (model.id,), held)
            if model.external and self._front_door:
                meters.gauge(table.EXTERNAL_UP, (model.id,), self._fleet.status(model).state == "awake")
        if self._runner:
            meters.gauge(table.BATCH_LEFT, (), self._runner.lines_left)
