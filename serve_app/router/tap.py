"""What lies around an endpoint to see requests and answers pass: the body anew, and the answer while it is sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from serve_app.conversations.answer import Answer, Events
from serve_app.errors import ApiError
from serve_app.router.body import read_body
from serve_app.router.disconnect import ClientGone
from serve_app.router.headers import headers_of
from serve_app.router.record import request_id
from serve_app.router.reply import Reply
from serve_app.service_schema import RouterSettings

HEADER = "x-router-conversation"
DROPPED_HEADER = "x-router-conversation-dropped"
UNAVAILABLE = "unavailable"

_STREAM_END = b"data: [DONE]\n\n"
_NOT_KEPT = f": {HEADER}: {UNAVAILABLE}\n\n".encode()


async def body_of(scope: Scope, receive: Receive, send: Send, settings: RouterSettings) -> bytes | None:
    """The request's body; None where the client is gone, or has its answer already."""
    try:
        return await read_body(
            headers_of(scope), receive, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s
        )
    except ApiError as error:
        await refuse(scope, send, error)
    except ClientGone:
        pass
    return None


async def refuse(scope: Scope, send: Send, error: ApiError) -> None:
    """Answer with an error."""
    reply = Reply(send, stream=False)
    reply.headers["x-request-id"] = request_id(headers_of(scope))
    await reply.error(error)


def with_body(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives this body first."""
    given = False

    async def receiving() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receiving


class Tap:
    """A `send` that adds headers and shows the answer to `answer`.

    `keep` is called once the answer has ended well, and before the client can know that: its next request finds what
    was kept. It says whether that was done. `edit` changes a whole answer, told the same. `ends`: whether streams
    of this API end with `[DONE]`.
    """

    def __init__(
        self,
        send: Send,
        headers: dict[str, str],
        answer: Answer | None = None,
        keep: Callable[[], Awaitable[bool]] | None = None,
        *,
        edit: Callable[[bytes, bool], bytes] | None = None,
        ends: bool = True,
    ) -> None:
        self._send = send
        self._headers = headers
        self._answer = answer
        self._keep = keep
        self._edit = edit
        self._ends = ends
        self._events = Events()
        self._streams = False
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._streams = Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")
            if self._streams or message["status"] != 200:
                self._answer = self._answer if self._streams else None
                await self._send(self._headed(message))
            else:
                # What its headers say of the conversation is only known when the answer is kept.
                self._start = message
        elif self._start:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._whole(self._start)
        else:
            await self._piece(message)

    async def _whole(self, start: Message) -> None:
        body = self._body
        if self._answer:
            self._answer.whole(body)
        kept = await self._kept()
        if kept is False:
            self._headers[HEADER] = UNAVAILABLE
        if self._edit:
            body = self._edit(body, bool(kept))
        length = (b"content-length", str(len(body)).encode())
        headers = [length if name == b"content-length" else (name, value) for name, value in start["headers"]]
        await self._send(self._headed({**start, "headers": headers}))
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _piece(self, message: Message) -> None:
        body: bytes = message.get("body", b"")
        if self._answer:
            for event in self._events.feed(body):
                self._answer.event(event)
            if await self._kept() is False:
                # Its headers, sent long ago, said that it would be.
                body = _NOT_KEPT + body
        if self._streams and not self._ends:
            body = body.removesuffix(_STREAM_END)
        if body or not message.get("more_body"):
            await self._send({**message, "body": body})

    async def _kept(self) -> bool | None:
        """Keep the answer if that is due; None if it is not."""
        if not (self._answer and self._answer.ended and self._keep):
            return None
        keep, self._keep = self._keep, None
        return await keep()

    def _headed(self, start: Message) -> Message:
        added = [(name.encode(), value.encode()) for name, value in self._headers.items()]
        return {**start, "headers": [*start["headers"], *added]}
