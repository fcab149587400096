"""The one error type that clients see, in OpenAI's shape. Messages never hold what the client wrote."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A refusal with its HTTP status and OpenAI error fields.

    `param` is the name of a field, never its content. `retry_after_s`, where set, is sent as Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        """OpenAI's error type for the status."""
        if self.status == 429:
            return "rate_limit_error"
        if self.status in (401, 403):
            return "authentication_error" if self.status == 401 else "permission_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def payload(self) -> dict[str, Any]:
        """The JSON body of the answer."""
        fields = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": fields}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param=param, code=code or "invalid_value")


def model_not_found(param: str = "model") -> ApiError:
    """The 404 for a model that is not configured."""
    return ApiError(404, "No such model. GET /v1/models lists what there is.", param=param, code="model_not_found")


def unavailable(message: str, *, code: str, retry_after_s: float) -> ApiError:
    """A 503 that says when to come back."""
    return ApiError(503, message, code=code, retry_after_s=retry_after_s)


def own_fault() -> ApiError:
    """The 500 for what must not happen."""
    return ApiError(500, "The router failed on this request; its log says why.", code="internal_error")
