"""`GET /v1/models`: every model that a key may use, and how it is."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from serve_app.catalog import AUTO, Catalog, allowing
from serve_app.errors import model_not_found
from serve_app.model_schema import Model
from serve_app.router.auth import CALLER, Caller
from serve_app.router.fleet import Fleet
from serve_app.router.reply import json_response

_CREATED = int(time.time())


class ModelCards:
    """Endpoints that load nothing."""

    def __init__(self, catalog: Catalog, fleet: Fleet) -> None:
        self._catalog = catalog
        self._fleet = fleet

    async def list(self, request: Request) -> Response:
        """Every model that the key may use, with its state; loads nothing."""
        cards = [self._card(model) for model in self._seen(request).models.values()]
        return json_response({"object": "list", "data": [*cards, self._auto_card(request)] if cards else []})

    async def one(self, request: Request) -> Response:
        """One model by its id or an alias; ids may hold slashes."""
        seen = self._seen(request)
        if request.path_params["name"] == AUTO and seen.models:
            return json_response(self._auto_card(request))
        model = seen.find(request.path_params["name"])
        if model is None:
            raise model_not_found()
        return json_response(self._card(model))

    def _seen(self, request: Request) -> Catalog:
        caller: Caller = request.scope[CALLER]
        return self._catalog if caller.models is None else allowing(self._catalog, caller.models)

    def _auto_card(self, request: Request) -> dict[str, object]:
        root = self._seen(request).default_id
        return {"id": AUTO, "object": "model", "created": _CREATED, "owned_by": "switchyard", "root": root}

    def _card(self, model: Model) -> dict[str, object]:
        status = self._fleet.status(model)
        waking = status.state not in ("awake",)
        return {
            "id": model.id,
            "object": "model",
            "created": _CREATED,
            "owned_by": "switchyard",
            "root": model.id,
            "max_model_len": model.context,
            "aliases": model.aliases,
            "tier": model.tier,
            "abilities": model.abilities,
            "max_ongoing_requests": model.max_ongoing_requests,
            "max_queued_requests": model.queue.size,
            "state": status.state,
            "progress": status.progress,
            "in_flight": status.in_flight,
            "waiting": status.waiting,
            "kv_cache": status.kv_cache,
            "place": status.place,
            "expected_wake_s": status.expected_wake_s if waking else 0,
            "load_s": status.expected_load_s,
            "memory_bytes": status.memory_bytes,
            "pinned": status.pinned,
            "loads": status.loads,
            "wakes": status.wakes,
            "load_phases": status.phases,
            "failure": status.failure or None,
        }
