"""`/v1/files`, as OpenAI's client uses it."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

import orjson
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.types import Message, Receive

from serve_app.batches.files import Page
from serve_app.batches.store import Store
from serve_app.errors import ApiError, bad_request
from serve_app.router.auth import CALLER, Caller
from serve_app.service_schema import Batches

_FORM_BYTES = 64 * 1024  # fields and boundaries besides the file itself
LONGEST_PAGE = 10_000
_RANGES = (b"range", b"if-range")
_DAY_S = 86_400


class FilesApi:
    """The endpoints; without a store each says so."""

    def __init__(self, store: Store | None, settings: Batches, body_timeout_s: float) -> None:
        self._store = store
        self._settings = settings
        self._body_timeout_s = body_timeout_s

    async def create(self, request: Request) -> Response:
        """Keep an uploaded file."""
        store = on(self._store)
        async with self._form(request) as form:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise bad_request("Send the content as a form's field `file`, with a file name.", "file")
            if form.get("purpose") != "batch":
                raise bad_request("The purpose must be `batch`.", "purpose")
            if (file.size or 0) > self._settings.max_file_bytes:
                raise self._too_large()
            stored = await run_in_threadpool(
                store.files.add,
                key_of(request),
                file.file,
                filename=_plain(file.filename or "file"),
                purpose="batch",
                keep_s=self._keep_s(form),
            )
        return answer(stored.card())

    async def list(self, request: Request) -> Response:
        """The key's files, page by page."""
        store = on(self._store)
        order = order_of(request)
        page = await run_in_threadpool(
            store.files.page,
            key_of(request),
            purpose=request.query_params.get("purpose"),
            after=request.query_params.get("after"),
            limit=limit_of(request, default=LONGEST_PAGE, most=LONGEST_PAGE),
            newest_first=order == "desc",
        )
        return answer(listed(page))

    async def retrieve(self, request: Request) -> Response:
        """What is known of one file."""
        store = on(self._store)
        found = await run_in_threadpool(store.files.get, key_of(request), request.path_params["file_id"])
        return answer(found.card())

    async def content(self, request: Request) -> Response:
        """Its content."""
        store = on(self._store)
        path = await run_in_threadpool(store.files.path, key_of(request), request.path_params["file_id"])
        # Always whole: what OpenAI's clients ask for. Ranges have a status, a form of errors and a cost of their own.
        request.scope["headers"] = [header for header in request.scope["headers"] if header[0] not in _RANGES]
        return FileResponse(path, media_type="application/octet-stream")

    async def delete(self, request: Request) -> Response:
        """Forget it."""
        store = on(self._store)
        file_id = request.path_params["file_id"]
        await run_in_threadpool(store.files.delete, key_of(request), file_id)
        return answer({"id": file_id, "object": "file", "deleted": True})

    @contextlib.asynccontextmanager
    async def _form(self, request: Request) -> AsyncIterator[FormData]:
        """The parsed form; its file waits on the disk, where it is large."""
        most = self._settings.max_file_bytes + _FORM_BYTES
        if int(request.headers.get("content-length") or 0) > 2 * most:
            raise self._too_large()
        bounded = Request(request.scope, self._bounded(request, most))
        try:
            form = await bounded.form(max_files=1, max_fields=16, max_part_size=_FORM_BYTES)
        except HTTPException as error:
            raise bad_request(f"The form is wrong: {error.detail}", code="invalid_form") from None
        except TimeoutError:
            message = f"Nothing of the file arrived for {self._body_timeout_s:g} s."
            raise ApiError(408, message, code="body_timeout") from None
        except ClientDisconnect:
            raise ApiError(400, "The upload broke off.", code="upload_broken") from None
        try:
            yield form
        finally:
            await form.close()

    def _bounded(self, request: Request, most: int) -> Receive:
        size = 0

        async def receive() -> Message:
            nonlocal size
            async with asyncio.timeout(self._body_timeout_s):
                message = await request.receive()
            size += len(message.get("body", b""))
            if size > most:
                if message.get("more_body"):
                    await self._drain(request, most)
                raise self._too_large()
            return message

        return receive

    async def _drain(self, request: Request, most: int) -> None:
        """What is too much is read and dropped, within reason: a client that still writes would see a reset."""
        size = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._body_timeout_s):
                while size < most:
                    message = await request.receive()
                    size += len(message.get("body", b""))
                    if not message.get("more_body"):
                        return

    def _too_large(self) -> ApiError:
        message = f"The file is larger than {self._settings.max_file_bytes} bytes."
        return ApiError(413, message, code="file_too_large", param="file")

    def _keep_s(self, form: FormData) -> float:
        keep_s = self._settings.keep_days * _DAY_S
        given = form.get("expires_after[seconds]")
        if given is None:
            return keep_s
        if not isinstance(given, str) or not 3600 <= _number(given) <= 30 * _DAY_S:
            raise bad_request("From 3600 to 2592000 seconds.", "expires_after.seconds")
        return min(keep_s, int(given))


def on(store: Store | None) -> Store:
    """The store. Raises `ApiError` (404) where there is none."""
    if store is None:
        message = "Files and batches are off here: `batches.directory` is not configured."
        raise ApiError(404, message, code="batches_off")
    return store


def key_of(request: Request) -> str:
    """The id of the key that a request came with; everything here belongs to one."""
    caller: Caller = request.scope[CALLER]
    return caller.id


def order_of(request: Request) -> str:
    """`asc` or `desc`, which is the default. Raises `ApiError` (400)."""
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_request("The order is asc or desc.", "order")
    return order


def limit_of(request: Request, *, default: int, most: int) -> int:
    """The length of a page that the client asked for."""
    given = request.query_params.get("limit", str(default))
    if not 1 <= _number(given) <= most:
        raise bad_request(f"A number from 1 to {most}.", "limit")
    return _number(given)


def _number(text: str) -> int:
    """A whole number; -1 for what is none. (`int` raises for some of what `isdigit` takes, and for 4,301 digits.)"""
    return int(text) if re.fullmatch("[0-9]{1,12}", text) else -1


def listed(page: Page[Any]) -> dict[str, object]:
    """OpenAI's list object."""
    cards = [item.card() for item in page.items]
    return {
        "object": "list",
        "data": cards,
        "first_id": cards[0]["id"] if cards else None,
        "last_id": cards[-1]["id"] if cards else None,
        "has_more": page.more,
    }


def answer(content: Mapping[str, object]) -> Response:
    """A JSON response."""
    return Response(orjson.dumps(content), media_type="application/json")


def _plain(name: str) -> str:
    """A file name as it is shown again: no path, nothing that does not print, no lone surrogate."""
    last = name.replace("\\", "/").rsplit("/", 1)[-1]
    return "".join(sign for sign in last if sign.isprintable())[:200] or "file"
