"""`POST /v1/router/models/{id}/load|sleep|unload|pin|unpin`: what an operator may have done to a lazy model."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Sequence

import orjson
from starlette.requests import Request
from starlette.responses import Response

from serve_app.catalog import Catalog
from serve_app.config import Config
from serve_app.errors import ApiError, bad_request, model_not_found
from serve_app.residency.events import Order
from serve_app.router.fleet import Fleet


class Admin:
    """Only for admin keys; without any, for everybody where nobody but this machine can reach us.

    Of the front door that is known; Serve's own ingress listens where `http_options` say.
    """

    def __init__(self, config: Config, catalog: Catalog, fleet: Fleet, *, front_door: bool) -> None:
        self._catalog = catalog
        self._fleet = fleet
        self._hashes: Sequence[str] = config.security.admin_keys_sha256
        self._open = front_door and not self._hashes and is_loopback(config.router.host)

    async def order(self, request: Request) -> Response:
        """The endpoint."""
        if not self._open:
            authorize(request.headers.get("authorization", ""), self._hashes)
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


def authorize(header: str, hashes: Sequence[str]) -> None:
    """Raise 401 without a key, 403 with a wrong one. Takes the same time whichever key it is."""
    scheme, _, key = header.partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise ApiError(401, "This needs an operator's key: `Authorization: Bearer KEY`.", code="missing_api_key")
    digest = hashlib.sha256(key.strip().encode()).hexdigest()
    if not sum(hmac.compare_digest(digest, known) for known in hashes):
        raise ApiError(403, "This key is not an operator's.", code="not_an_admin")


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
