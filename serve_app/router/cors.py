"""Web pages that may call the API from a browser: those of `security.cors_origins`, and none without it."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from serve_app.errors import ApiError
from serve_app.router.reply import error_response
from serve_app.service_schema import Security


class Cors(CORSMiddleware):
    """Answers preflights, which carry no key, and lets listed pages read answers. Keys are headers, never cookies."""

    def __init__(self, app: ASGIApp, security: Security) -> None:
        super().__init__(
            app,
            allow_origins=security.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),  # OpenAI's client sends a dozen of its own
            expose_headers=("*",),
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """Starlette's, with a refusal in our shape."""
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        return error_response(ApiError(403, "This web page may not call the API like this.", code="wrong_origin"))
