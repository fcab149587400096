"""`/ui`: the page for people, served as it lies in `serve_app/ui`. It holds no secret and so needs no key.

What it shows it asks of the API, as any client does, with the key that it is given.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_DIRECTORY = Path(__file__).resolve().parents[1] / "ui"
_ENTRY = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing but our own files runs, nothing but this service is asked, nobody frames the page, and text stays text: with
# trusted types a browser refuses to make markup of a string.
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # Kept, and asked for again each time: files of two versions must not meet.
    "cache-control": "no-cache",
}


class Page:
    """The routes of the page, and their `paths`; none unless it is `enabled`."""

    def __init__(self, *, enabled: bool) -> None:
        self.routes = [Route(path, _answering(path)) for path in (_files() if enabled else ())]
        if enabled:
            self.routes.append(Route("/ui/", _to_page))
        self.paths = frozenset(route.path for route in self.routes)


@functools.cache
def _files() -> Mapping[str, tuple[bytes, str]]:
    """The content and the type of each file, by its path."""
    return {
        "/ui" if file.name == _ENTRY else f"/ui/{file.name}": (file.read_bytes(), _TYPES[file.suffix])
        for file in sorted(_DIRECTORY.iterdir())
        if file.suffix in _TYPES
    }


def _answering(path: str) -> Callable[[Request], Coroutine[None, None, Response]]:
    content, kind = _files()[path]
    headers = {**_HEADERS, "etag": f'"{hashlib.sha256(content).hexdigest()[:16]}"'}

    async def answer(request: Request) -> Response:
        if headers["etag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, headers={**headers, "content-type": kind})

    return answer


async def _to_page(request: Request) -> Response:
    # Relative: whatever stands in front may have put a path of its own before ours.
    return Response(status_code=307, headers={"location": "../ui"})
