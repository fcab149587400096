"""What goes wrong outside the endpoints of `Generate`, as answers in the shape of the API that was asked."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ExceptionHandler

from serve_app.errors import ApiError, own_fault
from serve_app.router.dialect import dialect_of
from serve_app.router.reply import error_response


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {
        404: ("No such path. The API is below /v1.", "not_found"),
        405: ("This path does not take that method.", "method_not_allowed"),
    }
    message, code = known.get(error.status_code, ("The request was refused.", "refused"))
    response = error_response(ApiError(error.status_code, message, code=code), dialect_of(request.url.path))
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def _fault(request: Request, error: Exception) -> Response:
    return error_response(own_fault(), dialect_of(request.url.path))


# For Starlette, by what was raised.
HANDLERS: dict[type[Exception], ExceptionHandler] = {
    HTTPException: _http_error,
    ApiError: _api_error,
    Exception: _fault,
}
