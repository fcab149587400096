"""`POST /v1/router/models/{id}/load|sleep|unload|pin|unpin`: what an operator may have done to a lazy model."""

from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import Response

from serve_app.catalog import Catalog
from serve_app.errors import ApiError, bad_request, model_not_found
from serve_app.residency.events import Order
from serve_app.router.auth import ANONYMOUS, CALLER, Caller
from serve_app.router.fleet import Fleet


class Admin:
    """For operators only (`Keys` says who is one)."""

    def __init__(self, catalog: Catalog, fleet: Fleet) -> None:
        self._catalog = catalog
        self._fleet = fleet

    async def order(self, request: Request) -> Response:
        """The endpoint."""
        require_operator(request.scope[CALLER])
        model = self._catalog.find(request.path_params["name"])
        if model is None:
            raise model_not_found()
        try:
            order = Order(request.path_params["order"])
        except ValueError:
            orders = ", ".join(Order)
            raise ApiError(404, f"No such order; there is {orders}.", code="not_found") from None
        if model.tier == "resident":
            raise bad_request(f"{model.id} is resident: it is always loaded, and cannot be told to {order.value}.")
        await self._fleet.order(model, order)
        content = {"id": model.id, "order": order.value, "state": self._fleet.status(model).state}
        return Response(orjson.dumps(content), 202, media_type="application/json")


def require_operator(caller: Caller) -> None:
    """Raise 401 or 403 for whoever is no operator."""
    if caller.admin:
        return
    if caller.id == ANONYMOUS:
        raise ApiError(401, "This needs the key of an operator; see security.keys.", code="missing_api_key")
    raise ApiError(403, "This key is not an operator's.", code="not_an_admin")
