"""The load profile against a service whose answers are known: all that it sends is counted as what it was."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import orjson
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.e2e.service import wait_until
from tests.load.__main__ import KINDS, on_loopback, run, show
from tests.ports import free_port

SECONDS = 6


class Known:
    """Answers well mostly, and sometimes with each thing that is counted apart; `sent` counts what it did."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.keys: set[str] = set()
        self._script = itertools.cycle(["whole", "whole", "429", "whole", "503", "500", "whole", "no retry"])
        self._streams = itertools.cycle(["whole", "whole", "cut", "whole", "error event"])
        self.app = Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ]
        )

    async def models(self, request: Request) -> Response:
        self.keys.add(request.headers.get("authorization", ""))
        chat = {"abilities": ["chat"]}
        return JSONResponse({"data": [{"id": "hot", "tier": "resident", **chat}, {"id": "c", "tier": "lazy", **chat}]})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        what = next(self._script)
        if body.get("model") == "c":
            self.sent["to the cold model"] += 1
        if what == "whole" and body["stream"]:
            what = next(self._streams) if body["max_tokens"] != 512 else "for ever"
        self.sent[what] += 1
        error = {"error": {"message": "m", "type": "t", "param": None, "code": "c"}}
        if what in ("429", "503", "500", "no retry"):
            status = 503 if what == "no retry" else int(what)
            return JSONResponse(error, status, headers={} if what == "no retry" else {"retry-after": "0"})
        if body["stream"]:
            return StreamingResponse(self._events(what, error), media_type="text/event-stream")
        return JSONResponse({"choices": [{"message": {"content": "x"}}]})

    async def _events(self, what: str, error: dict[str, Any]) -> AsyncIterator[bytes]:
        for _ in range(3) if what != "for ever" else itertools.count():
            yield b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
            await asyncio.sleep(0.01)
        if what == "error event":
            yield b"data: " + orjson.dumps(error) + b"\n\n"
        if what != "cut":
            yield b"data: [DONE]\n\n"


@pytest.fixture
def known() -> Iterator[tuple[Known, str]]:
    service, port = Known(), free_port()
    server = uvicorn.Server(uvicorn.Config(service.app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started, 10, "the service listens")
        yield service, f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def test_everything_is_counted_as_what_it_was(
    known: tuple[Known, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, url = known
    # As on a developer's machine, where nothing of this may reach it.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    result = run(url, ["a", "b"], users=24, seconds=SECONDS)
    counted: Counter[str] = Counter()
    for row in result["rows"]:
        counted[row["method"]] += row["count"]
    kinds = Counter(dict.fromkeys(("status 500", "cut stream", "event c", "503 without Retry-After"), 0))
    for failure in result["failures"]:
        kinds[failure["kind"]] += failure["count"]
    sent = service.sent
    assert service.keys == {"Bearer a", "Bearer b"}
    assert sent["to the cold model"]
    # A stream that is left may have been answered to none, when the run was over.
    assert abs(counted["left"] - sent["for ever"]) <= 2
    assert (counted["429"], counted["503"]) == (sent["429"], sent["503"])
    assert kinds == {
        "status 500": sent["500"],
        "cut stream": sent["cut"],
        "event c": sent["error event"],
        "503 without Retry-After": sent["no retry"],
    }
    assert counted["whole"] == sent["whole"]
    assert counted["failed"] == kinds.total()
    assert show(result, SECONDS) == 1
    shown = capsys.readouterr().out
    assert all(kind in shown for kind in (*KINDS, *kinds))


def test_other_machines_are_asked_only_where_that_is_meant() -> None:
    assert all(map(on_loopback, ("http://127.0.0.1:8000", "http://localhost:1", "http://[::1]:2")))
    assert not any(map(on_loopback, ("http://10.0.0.1:8000", "https://example.org", "http://127.0.0.1.example.org")))
