"""The headers of a request: starlette's, for a request of which a dozen are asked for."""

from __future__ import annotations

from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

_HEADERS = "switchyard.headers"


class RequestHeaders(Headers):
    """Looked up in a table; `starlette.datastructures.Headers` goes through all of them each time."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope=scope)
        self.given = scope["headers"]
        # As starlette does it: of several with one name the first.
        self._first = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(self.raw)}

    def __getitem__(self, key: str) -> str:
        return self._first[key.lower()]

    def __contains__(self, key: Any) -> bool:
        return key.lower() in self._first

    def get(self, key: str, default: Any = None) -> Any:
        """See `Mapping`."""
        return self._first.get(key.lower(), default)


def headers_of(scope: Scope) -> RequestHeaders:
    """The headers of the request with this scope."""
    found: RequestHeaders | None = scope.get(_HEADERS)
    # A layer in between may have given it others.
    if found is None or found.given is not scope["headers"]:
        found = scope[_HEADERS] = RequestHeaders(scope)
    return found
