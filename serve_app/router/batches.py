"""`/v1/batches`, as OpenAI's client uses it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from serve_app.batches.plan import ENDPOINTS
from serve_app.batches.state import window_s
from serve_app.batches.store import Store
from serve_app.errors import bad_request
from serve_app.model_schema import resolve_dir
from serve_app.router.body import read_json
from serve_app.router.files import answer, key_of, limit_of, listed, on
from serve_app.service_schema import Batches

_MAX_BODY_BYTES = 64 * 1024
LONGEST_PAGE = 100
_DAY_S = 86_400


class _Wish(BaseModel):
    """The body of `POST /v1/batches`; what else OpenAI takes there is not for us to refuse."""

    model_config = ConfigDict(strict=True)

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        None, max_length=16
    )


class BatchesApi:
    """The endpoints; without a store each says so."""

    def __init__(self, store: Store | None, body_timeout_s: float) -> None:
        self._store = store
        self._body_timeout_s = body_timeout_s

    async def create(self, request: Request) -> Response:
        """Accept a batch; it is checked and run later."""
        store = on(self._store)
        body = await read_json(
            request.headers, request.receive, max_bytes=_MAX_BODY_BYTES, timeout_s=self._body_timeout_s
        )
        try:
            wish = _Wish.model_validate(body)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            param = ".".join(str(part) for part in problem["loc"][:1])
            raise bad_request(f"{param or 'body'}: {problem['msg']}.", param or None) from None
        if wish.endpoint not in ENDPOINTS:
            raise bad_request(f"The endpoint must be one of {', '.join(ENDPOINTS)}.", "endpoint")
        seconds = window_s(wish.completion_window)
        if seconds is None:
            raise bad_request("A completion window is hours or days, such as 24h; at most 30d.", "completion_window")
        batch = await run_in_threadpool(
            store.create,
            key_of(request),
            input_file_id=wish.input_file_id,
            endpoint=wish.endpoint,
            window=wish.completion_window,
            window_s=seconds,
            metadata=wish.metadata,
        )
        return answer(batch.card())

    async def list(self, request: Request) -> Response:
        """The key's batches, the newest first, page by page."""
        store = on(self._store)
        after = request.query_params.get("after")
        limit = limit_of(request, default=20, most=LONGEST_PAGE)
        return answer(listed(await run_in_threadpool(store.page, key_of(request), after=after, limit=limit)))

    async def retrieve(self, request: Request) -> Response:
        """How a batch stands."""
        store = on(self._store)
        found = await run_in_threadpool(store.get, key_of(request), request.path_params["batch_id"])
        return answer(found.card())

    async def cancel(self, request: Request) -> Response:
        """Have it end; what has run by then is kept."""
        store = on(self._store)
        found = await run_in_threadpool(store.cancel, key_of(request), request.path_params["batch_id"])
        return answer(found.card())


def batch_store(settings: Batches) -> Store | None:
    """Where they are kept; None where that is not configured. Raises `OSError` for a directory that cannot be."""
    if not settings.directory:
        return None
    return Store(resolve_dir(settings.directory), keep_s=settings.keep_days * _DAY_S)
