"""An OpenAI-compatible server that costs next to nothing, so that what stands before it is what is measured.

    python -m benchmarks.instant_engine --port 9000

It answers chat completions, streamed and not, with the words that `engines/fake.py` says: "t000 t001 t002 ...". How
many and how fast stands in the last message, as for that engine: `fake[tokens=128,tpot_s=0.008]`. Every token of a
stream is a write of its own, the next one on the next turn of the event loop or when its time has come, never sooner.
One process, one thread, no framework. Only loopback addresses.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import re
from collections.abc import Iterator
from typing import cast

import orjson
import uvloop

MODEL = "instant"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_TOKENS = re.compile(rb"fake\[[^\]]*\btokens=(\d+)")
_PACE = re.compile(rb"fake\[[^\]]*\btpot_s=([0-9.]+)")
_STREAMS = re.compile(rb'"stream": ?true')
_USAGE_ASKED = re.compile(rb'"include_usage": ?true')
_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)
_DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_MODELS = orjson.dumps(
    {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "bench"}]}
)
_numbers = itertools.count()


def words(tokens: int) -> list[bytes]:
    """The answer, token by token; a client checks it against this."""
    return [b"t000", *(b" t%03d" % (index % 1000) for index in range(1, tokens))][:tokens]


def _frame(event: bytes) -> bytes:
    data = b"data: " + event + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


class Connection(asyncio.Protocol):
    """One kept-alive connection; requests are answered one after the other."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._answering = False
        self._timer: asyncio.Handle | None = None
        self._full = False
        self._stalled: tuple[Iterator[bytes], float, float] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._timer:
            self._timer.cancel()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        if stalled := self._stalled:
            self._stalled = None
            self._write(*stalled)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._answering:
            self._next()

    def _next(self) -> None:
        head, ended, rest = self._buffer.partition(b"\r\n\r\n")
        if not ended:
            return
        found = _LENGTH.search(head)
        length = int(found[1]) if found else 0
        if len(rest) < length:
            return
        body, self._buffer = rest[:length], rest[length:]
        self._answering = True
        if head.startswith(b"POST"):
            self._generate(body)
        else:
            self._whole(_MODELS)

    def _whole(self, body: bytes) -> None:
        if self._transport:
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            self._transport.write(head + body)
        self._over()

    def _over(self) -> None:
        self._answering = False
        if self._buffer:
            self._loop.call_soon(self._next)

    def _generate(self, body: bytes) -> None:
        said, paced = _TOKENS.search(body), _PACE.search(body)
        tokens, pace_s = int(said[1]) if said else 16, float(paced[1]) if paced else 0.0
        usage = {"prompt_tokens": 16, "completion_tokens": tokens, "total_tokens": 16 + tokens}
        base = b'{"id":"chatcmpl-%032x","object":"chat.completion%s","created":0,"model":"%s",'
        number, model = next(_numbers), MODEL.encode()
        if not _STREAMS.search(body):
            message = {"role": "assistant", "content": b"".join(words(tokens)).decode(), "tool_calls": []}
            choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
            rest = orjson.dumps({"choices": [choice], "usage": usage})[1:]
            self._whole(base % (number, b"", model) + rest)
            return
        start = base % (number, b".chunk", model)
        before = start + b'"choices":[{"index":0,"delta":{"content":"'
        after = b'"},"logprobs":null,"finish_reason":null,"token_ids":null}]}'
        opening = b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null}]}'
        closing = b'"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":null}]}'
        end = _frame(start + closing)
        if _USAGE_ASKED.search(body):
            end += _frame(start + b'"choices":[],"usage":' + orjson.dumps(usage) + b"}")
        pieces = [_frame(before + word + after) for word in words(tokens)]
        pieces[0] = _HEAD + _frame(start + opening) + pieces[0]
        pieces[-1] += end + _DONE
        self._write(iter(pieces), self._loop.time(), pace_s)

    def _write(self, pieces: Iterator[bytes], due: float, pace_s: float) -> None:
        """Write one token, and come again for the next."""
        if self._transport is None:
            return
        if self._full:
            self._stalled = pieces, due, pace_s
            return
        piece = next(pieces, None)
        if piece is None:
            self._over()
            return
        self._transport.write(piece)
        if pace_s:
            due += pace_s
            self._timer = self._loop.call_at(due, self._write, pieces, due, pace_s)
        else:
            self._timer = self._loop.call_soon(self._write, pieces, due, pace_s)


async def _serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def main() -> None:
    """Serve until ended."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instant_engine", description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(_serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
