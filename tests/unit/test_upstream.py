"""Connections to engines that misbehave: no byte of one answer may reach another request, and none be made up."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gzip
import random
import re
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.models.replicas import Foreign, Target
from serve_app.router.connection import Answer, Broken, UpstreamError
from serve_app.router.upstream import Upstream

PATIENCE_S = 20.0
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
HEAD = b"HTTP/1.1 200 OK\r\n"

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Runs a test on each of the two loops that the Router runs on."""

    def running(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(asyncio.wait_for(main, PATIENCE_S))

    return running


@contextlib.asynccontextmanager
async def engine(serve: Serve, host: str = "127.0.0.1") -> AsyncIterator[tuple[Upstream, Target]]:
    """A pool of connections, and an engine that answers as `serve` says, once for each connection."""

    async def serving(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await serve(reader, writer)
        writer.close()

    server = await asyncio.start_server(serving, host, 0)
    port = server.sockets[0].getsockname()[1]
    upstream = Upstream(5.0)
    try:
        yield upstream, Target("r", f"http://{f'[{host}]' if ':' in host else host}:{port}", "s")
    finally:
        await upstream.close()
        server.close()


async def asked(reader: asyncio.StreamReader) -> bytes:
    """The body of the next request."""
    head = await reader.readuntil(b"\r\n\r\n")
    found = re.search(rb"content-length: (\d+)", head)
    return await reader.readexactly(int(found[1]) if found else 0)


def says(*pieces: bytes, end: bool = False, apart_s: float = 0.002) -> Serve:
    """Answers every request in these pieces, and closes the connection or keeps it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await asked(reader)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(apart_s)  # so that they arrive apart; no outcome depends on it
            if end:
                return

    return serve


def reset(writer: asyncio.StreamWriter) -> None:
    """Break the connection off as a killed process does."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def answer_of(upstream: Upstream, target: Target, body: bytes = b"{}") -> bytes:
    with await upstream.post(target, "/x", {}, body) as answer:
        return await answer.read()


def counted(serve: Serve) -> tuple[Serve, list[int]]:
    """The same engine, and a list with an entry for each connection."""
    connections: list[int] = []

    async def counting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        await serve(reader, writer)

    return counting, connections


OK = HEAD + b"content-length: 2\r\n\r\nok"


@pytest.mark.parametrize(
    "said",
    [
        (OK,),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nx-trailer: a\r\n\r\n",),
        (b"HTTP/1.1 102 Processing\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n" + OK),
        tuple(OK[at : at + 1] for at in range(len(OK))),
    ],
    ids=["length", "trailers", "interim", "bytewise"],
)
def test_a_connection_is_used_again_after_a_whole_answer(run: Any, said: tuple[bytes, ...]) -> None:
    async def main() -> None:
        serve, connections = counted(says(*said))
        async with engine(serve) as (upstream, target):
            assert [await answer_of(upstream, target) for _ in range(3)] == [b"ok"] * 3
            assert len(connections) == 1

    run(main())


@pytest.mark.parametrize(
    "said",
    [
        OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"),
        OK.replace(b"HTTP/1.1", b"HTTP/1.0"),
        HEAD + b"\r\nok",
        b"HTTP/1.0 200 OK\r\n\r\nok",
    ],
    ids=["close", "http/1.0", "until-the-end", "http/1.0-until-the-end"],
)
def test_a_connection_that_ends_with_its_answer_is_not(run: Any, said: bytes) -> None:
    async def main() -> None:
        serve, connections = counted(says(said, end=True))
        async with engine(serve) as (upstream, target):
            assert [await answer_of(upstream, target) for _ in range(3)] == [b"ok"] * 3
            assert len(connections) == 3

    run(main())


STRAY = HEAD + b"content-length: 5\r\n\r\nSTRAY"


@pytest.mark.parametrize("stray", [STRAY, STRAY[:-2], HEAD, b"HTTP/1.1 408 Timeout\r\n\r\n", b"\0garbage"])
@pytest.mark.parametrize("pieces", [1, 2])
def test_what_an_engine_says_beyond_its_answer_is_nobodys(run: Any, stray: bytes, pieces: int) -> None:
    """Neither this request's, nor that of the next one on the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            body = await asked(reader)
            own = HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body)
            writer.write(own + stray if pieces == 1 else own)
            if pieces == 2:
                await asyncio.sleep(0.005)
                writer.write(stray)

    async def main() -> None:
        async with engine(serve) as (upstream, target):
            for number in range(4):
                body = b'"%d"' % number
                with await upstream.post(target, "/x", {}, body) as answer:
                    if pieces == 2:
                        await asyncio.sleep(0.02)  # it comes while the answer is still held
                    assert (answer.status, await answer.read()) == (200, body)

    run(main())


def test_an_engine_that_closes_at_once_is_a_broken_exchange(run: Any) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reset(writer)

    async def main() -> None:
        async with engine(serve) as (upstream, target):
            for _ in range(20):
                with pytest.raises(UpstreamError):
                    await answer_of(upstream, target)
            # However late the request is: the connection may be gone before it is used.
            answer = await upstream._connect(upstream._origin(target), 5.0)
            while answer._transport is not None:  # noqa: ASYNC110 # nobody is told
                await asyncio.sleep(0.001)
            with pytest.raises(Broken):
                await answer.asked(b"GET / HTTP/1.1\r\n\r\n")

    run(main())


@pytest.mark.parametrize("begun", [b"HTTP/1.1 200 OK\r\ncont", b"HTTP/1.1 100 Continue\r\n\r\n", b"H"])
def test_only_an_engine_that_said_nothing_was_gone_before_it_was_asked(run: Any, begun: bytes) -> None:
    """Else the request was at work, and would be done twice."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        writer.write(OK)
        await asked(reader)
        writer.write(begun)

    async def main() -> None:
        async with engine(serve) as (upstream, target):
            await answer_of(upstream, target)
            with pytest.raises(Broken) as broken:
                await answer_of(upstream, target)
            assert not broken.value.idle

    run(main())


def test_an_idle_connection_that_is_gone_is_said_to_have_been_idle(run: Any) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        writer.write(OK)
        await asked(reader)
        reset(writer)

    async def main() -> None:
        async with engine(serve) as (upstream, target):
            await answer_of(upstream, target)
            with pytest.raises(Broken) as broken:
                await answer_of(upstream, target)
            assert broken.value.idle

    run(main())


@pytest.mark.parametrize("framing", [b"", b"transfer-encoding: Chunked\r\n", b"content-length: 99\r\n"])
def test_an_answer_that_is_broken_off_is_never_a_whole_one(run: Any, framing: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked(reader)
        writer.write(HEAD + framing + b"\r\n" + (b"9\r\n{" if b"hunked" in framing else b"{"))
        await writer.drain()
        await asyncio.sleep(0.02)  # what was said would be lost with the connection
        if framing:
            writer.close()  # an end in order, but before its time
        else:
            reset(writer)

    async def main() -> None:
        async with engine(serve) as (upstream, target):
            with pytest.raises(Broken):
                await answer_of(upstream, target)

    run(main())


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\nok",
        HEAD + b"a: b\r\n folded\r\ncontent-length: 2\r\n\r\nok",
        HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"x: %b\r\n" % (b"a" * (1 << 20)),
        HEAD + b"".join(b"x-%d: a\r\n" % number for number in range(20_000)),
    ],
    ids=["ssh", "101", "both", "folded", "chunk", "header", "headers"],
)
def test_what_is_no_answer_is_refused(run: Any, said: bytes) -> None:
    async def main() -> None:
        async with engine(says(said)) as (upstream, target):
            with pytest.raises(Broken):
                await answer_of(upstream, target)

    run(main())


def test_a_refusal_before_the_whole_request_was_taken_is_read_and_its_connection_not_used_again(run: Any) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
        await asyncio.Event().wait()

    async def main() -> None:
        served, connections = counted(serve)
        async with engine(served) as (upstream, target):
            for _ in range(3):
                with await upstream.post(target, "/x", {}, b"x" * (16 << 20)) as answer:
                    assert (answer.status, await answer.read()) == (413, b"no")
            assert len(connections) == 3

    run(main())


def test_a_server_that_would_compress_its_answer_is_told_not_to(run: Any) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        said = b"ok" if b"accept-encoding: identity\r\n" in head else gzip.compress(b"ok")
        writer.write(HEAD + b"content-length: %d\r\n\r\n%b" % (len(said), said))

    async def main() -> None:
        async with engine(serve) as (upstream, target):
            foreign = dataclasses.replace(target, foreign=Foreign("/v1", 8, 5.0))
            assert await answer_of(upstream, foreign) == b"ok"

    run(main())


@pytest.mark.parametrize("host", ["::1"])
def test_an_address_of_ipv6_is_one_too(run: Any, host: str) -> None:
    async def main() -> None:
        async with engine(says(OK), host) as (upstream, target):
            assert await answer_of(upstream, target) == b"ok"

    run(main())


def test_a_sink_that_fails_is_told_and_gets_nothing_more(run: Any) -> None:
    got: list[bytes] = []

    def sink(data: bytes) -> None:
        got.append(data)
        raise ZeroDivisionError

    async def main() -> None:
        pieces = [HEAD + b"transfer-encoding: chunked\r\n\r\n", *[b"1\r\na\r\n"] * 20]
        async with engine(says(*pieces)) as (upstream, target):
            with await upstream.post(target, "/x", {}, b"{}") as answer:
                pouring = asyncio.ensure_future(answer.pour(sink))
                while not got:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                answer.pause()
                answer.resume()
                with pytest.raises(ZeroDivisionError):
                    await pouring
            await asyncio.sleep(0.05)
            assert len(got) == 1

    run(main())


@pytest.mark.parametrize("waits_for_client", [False, True])
def test_what_comes_faster_than_anybody_reads_is_handed_on_whole_and_many_pieces_at_a_time(
    run: Any, waits_for_client: bool
) -> None:
    pieces = [b"%d;" % number for number in range(2000)]
    head = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    body = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]
    says_it = says(head, *body, b"0\r\n\r\n", apart_s=0)

    async def main() -> None:
        got: list[bytes] = []
        async with engine(says_it) as (upstream, target):
            with await upstream.post(target, "/", {}, b"{}") as answer:

                def sink(data: bytes) -> None:
                    got.append(data)
                    if waits_for_client:
                        answer.pause()
                        asyncio.get_running_loop().call_soon(answer.resume)

                await answer.pour(sink)
            with await upstream.post(target, "/", {}, b"{}") as again:
                assert await again.read() == b"".join(pieces)
        assert b"".join(got) == b"".join(pieces)
        assert len(got) < len(pieces)

    run(main())


class Echo:
    """Answers with what it was asked, in a way that each request chooses at random, and often not to the end."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            body = await asked(reader)
            way = self._random.random()
            pause = self._random.random() * 0.004
            await asyncio.sleep(pause)
            if writer.transport.is_closing():
                return
            if way < 0.1:
                reset(writer)
                return
            said = body * self._random.choice([1, 1, 50])
            if way < 0.4:
                whole = HEAD + b"content-length: %d\r\n\r\n%b" % (len(said), said)
            else:
                half = len(said) // 2
                chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (said[:half], said[half:]))
                whole = HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
            if way > 0.9:
                whole += HEAD + b"content-length: 5\r\n\r\nSTRAY"
            cut = self._random.randrange(1, len(whole))
            writer.write(whole[:cut])
            await writer.drain()
            await asyncio.sleep(pause)
            if writer.transport.is_closing():
                return
            if way > 0.85 and way < 0.9:
                return
            writer.write(whole[cut:])
            if 0.8 < way < 0.85:
                return


@pytest.mark.parametrize("loop", LOOPS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_no_request_gets_a_byte_of_anothers_answer(loop: str, seed: int) -> None:
    chance = random.Random(seed)
    good = 0

    async def client(upstream: Upstream, target: Target, number: int) -> None:
        nonlocal good
        body = b"<%d>" % number
        got: list[bytes] = []
        try:
            async with asyncio.timeout(chance.choice([0.001, 0.003, 0.006, 5, 5, 5])):
                with await upstream.post(target, "/x", {}, body) as answer:
                    await _read(answer, chance.randrange(4), got)
                    good += 1
        except (UpstreamError, TimeoutError):
            pass
        whole = b"".join(got)
        assert (body * 51).startswith(whole), (body, whole)

    async def main() -> None:
        async with engine(Echo(seed)) as (upstream, target):
            for turn in range(5):
                await asyncio.gather(*(client(upstream, target, turn * 100 + number) for number in range(20)))
        assert good > 20

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(asyncio.wait_for(main(), PATIENCE_S))


async def _read(answer: Answer, way: int, got: list[bytes]) -> None:
    if way == 0:
        got.append(await answer.read())
    elif way == 1:
        await answer.pour(got.append)
    elif way == 2:
        async for part in answer:
            got.append(part)
    else:
        got.append(await answer.some())  # and leaves the rest
