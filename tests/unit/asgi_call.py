"""One request to an ASGI app, driven by hand: what it sends is seen at once, and the client can leave."""

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import orjson
from door_call import Door, request_of
from starlette.types import ASGIApp, Message

PATIENCE_S = 5.0


class Call:
    """A running request. `disconnect()` is the client closing its connection.

    `through`: "asgi" calls the app as Serve's ingress does; "door" goes over a socket and the front door's protocol.
    """

    through: Literal["asgi", "door"] = "asgi"

    def __init__(
        self,
        app: ASGIApp,
        body: object = b"",
        *,
        path: str = "/v1/chat/completions",
        query: str = "",
        method: str = "POST",
        headers: dict[str, str] | None = None,
        chunks: list[bytes] | None = None,
        unfinished: bool = False,
    ) -> None:
        raw = body if isinstance(body, bytes) else orjson.dumps(body)
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        parts = chunks if chunks is not None else [raw]
        for index, part in enumerate(parts):
            more = unfinished or index < len(parts) - 1
            self._incoming.put_nowait({"type": "http.request", "body": part, "more_body": more})
        sent = {"content-type": "application/json"} | (headers or {})
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in sent.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        self.messages: list[Message] = []
        self._news = asyncio.Event()
        self._door = Door(app, self._said) if self.through == "door" else None
        if self._door:
            request = request_of(method, path, query, sent, parts, unfinished=unfinished)
            self._task = asyncio.ensure_future(self._door.run(request))
        else:
            self._task = asyncio.ensure_future(app(scope, self._incoming.get, self._send))

    async def _send(self, message: Message) -> None:
        self._said(message)

    def _said(self, message: Message) -> None:
        self.messages.append(message)
        self._news.set()

    async def done(self) -> "Call":
        """Wait for the end of the request; what the app raises is raised here."""
        async with asyncio.timeout(PATIENCE_S):
            await self._task
        return self

    async def until(self, condition: Callable[["Call"], object]) -> None:
        """Wait until what was received fulfils the condition."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition(self):
                self._news.clear()
                await self._news.wait()

    def disconnect(self) -> None:
        if self._door:
            self._door.leave()
        self._incoming.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode("latin-1") for name, value in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error in OpenAI's shape; fails where it has another one."""
        fields = self.json["error"]
        assert set(fields) == {"message", "type", "param", "code"}
        assert isinstance(fields["message"], str)
        assert isinstance(fields["type"], str)
        assert all(fields[key] is None or isinstance(fields[key], str) for key in ("param", "code"))
        return dict(fields)

    @property
    def anthropic_error(self) -> dict[str, Any]:
        """The error in Anthropic's shape; fails where it has another one."""
        said = self.json
        assert (set(said), said["type"], set(said["error"])) == ({"type", "error"}, "error", {"type", "message"})
        assert isinstance(said["error"]["message"], str)
        assert isinstance(said["error"]["type"], str)
        return dict(said["error"])

    @property
    def named_events(self) -> list[dict[str, Any]]:
        """The data of every SSE event of Anthropic's API, whose name stands before it and in it."""
        text = self.body.decode()
        assert text.endswith("\n\n")
        blocks = [block for block in text.removesuffix("\n\n").split("\n\n") if not block.startswith(":")]
        events = []
        for block in blocks:
            name, _, data = block.partition("\ndata: ")
            events.append(orjson.loads(data))
            assert name == f"event: {events[-1]['type']}"
        return events

    @property
    def events(self) -> list[bytes]:
        """The data of every SSE event, read as a client does: any broken framing or text fails here."""
        text = self.body.decode()
        assert text.endswith("\n\n")
        events = []
        for block in text.removesuffix("\n\n").split("\n\n"):
            lines = [line for line in block.split("\n") if line and not line.startswith(":")]
            assert all(line.startswith("data: ") for line in lines), block
            if lines:
                data = "\n".join(line.removeprefix("data: ") for line in lines)
                assert data == "[DONE]" or isinstance(orjson.loads(data), dict)
                events.append(data.encode())
        return events
