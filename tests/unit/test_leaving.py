"""Clients that leave at an awkward moment, over real sockets: the engine is let go whatever the moment was."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from front import body, until
from front_door import connected, front_doors, request
from scripted_upstream import DONE, event, forever, silent, stream

from serve_app.router import protocol
from serve_app.router.disconnect import ClientGone, while_connected

LONG = {"context": 4_000_000}
STALLS = stream(event("a"), end="stall")


@pytest.mark.parametrize("size", [10, 70_000, 200_000, 3_000_000])
@pytest.mark.parametrize("streaming", [False, True])
async def test_a_client_with_a_long_prompt_is_missed_when_it_leaves(size: int, streaming: bool) -> None:
    """The end of a long body stopped the reading of its connection, and with it the news that it is closed."""
    async with front_doors(silent, model=LONG) as ((door,), (upstream,)), connected(door) as connection:
        await connection.send(request(body("x" * size, stream=streaming)))
        await until(lambda: upstream.seen, "the engine has it")
        connection.leave()
        await until(lambda: upstream.seen[0].closed.is_set(), "the engine is let go")
        await until(door.idle, "nothing is in flight")


async def test_a_client_that_leaves_in_order_is_missed_too() -> None:
    async with front_doors(STALLS, model=LONG) as ((door,), (upstream,)), connected(door) as connection:
        await connection.send(request(body("x" * 200_000, stream=True)))
        await connection.reader.readuntil(b"\r\n\r\n")
        connection.writer.close()
        await until(lambda: upstream.seen[0].closed.is_set(), "the engine is let go")
        await until(door.idle, "nothing is in flight")


async def paced(writer: asyncio.StreamWriter) -> None:
    """A stream that takes longer than a head may."""
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    for said in [*[event("a")] * 10, DONE]:
        writer.write(b"%x\r\n%b\r\n" % (len(said), said))
        await asyncio.sleep(0.05)  # not a wait for a state: the time is what is tried
    writer.write(b"0\r\n\r\n")


async def test_half_a_request_behind_a_stream_does_not_cut_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.2)
    async with front_doors(paced) as ((door,), _), connected(door) as connection:
        await connection.send(request(body(stream=True)) + b"POST /v1/ch")
        assert (await connection.answer())[2] == event("a") * 10 + DONE
        assert await connection.ended()


async def test_pipelined_streams_are_answered_in_order_and_let_go_when_their_client_leaves() -> None:
    whole = stream(event("a"), event("b"), DONE)
    async with front_doors(whole) as ((door,), (upstream,)), connected(door) as connection:
        await connection.send(request(body(stream=True)) * 3)
        for _ in range(3):
            assert (await connection.answer())[2] == event("a") + event("b") + DONE
        upstream.script = STALLS
        await connection.send(request(body(stream=True)))
        await until(lambda: len(upstream.seen) == 4, "the engine has it")
        connection.leave()
        await until(lambda: upstream.seen[-1].closed.is_set(), "the engine is let go")
        await until(door.idle, "nothing is in flight")


async def refuses_for_ever(writer: asyncio.StreamWriter) -> None:
    writer.write(b'HTTP/1.1 400 Bad Request\r\ncontent-length: 20\r\n\r\n{"')
    await forever()


async def test_a_refusal_that_never_ends_is_not_waited_for() -> None:
    hasty = {"ttft_timeout_s": 0.3}
    async with front_doors(refuses_for_ever, model=hasty) as ((door,), _), connected(door) as connection:
        await connection.send(request(body()))
        assert (await connection.answer())[0] == 504


async def both_at_once(first: str) -> tuple[bool, type[BaseException] | None]:
    """The client leaves and the request is cancelled in one turn of the loop: whether it saw it, and what came out."""
    wire, seen = Heard(), False

    async def work() -> None:
        nonlocal seen
        try:
            await forever()
        finally:
            seen = True

    task = asyncio.ensure_future(while_connected(wire, silent_client, work()))
    await asyncio.sleep(0)
    assert wire.left
    leave, cancel = wire.left, task.cancel
    for each in (leave, cancel) if first == "leaves" else (cancel, leave):
        each()
    await asyncio.wait([task])
    return seen, asyncio.CancelledError if task.cancelled() else type(task.exception())


class Heard:
    """A client's connection that only tells."""

    left: Callable[[], None] | None = None
    writable: Callable[[], None] | None = None
    open = True

    def write(self, data: bytes) -> bool:
        return True


async def silent_client() -> Any:
    await forever()


@pytest.mark.parametrize("first", ["leaves", "cancelled"])
async def test_a_shutdown_is_not_taken_for_a_client_that_leaves_in_the_same_moment(first: str) -> None:
    assert await both_at_once(first) == (True, asyncio.CancelledError)


async def test_a_client_that_leaves_while_the_work_ends_otherwise_leaves_no_cancellation_behind() -> None:
    """Else the next wait of this request would take it for its own, or for a shutdown."""
    wire = Heard()

    async def late() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            raise TimeoutError from None

    async def request() -> int:
        with contextlib.suppress(TimeoutError, ClientGone):
            await while_connected(wire, silent_client, late())
        task = asyncio.current_task()
        assert task
        return task.cancelling()

    task = asyncio.ensure_future(request())
    await asyncio.sleep(0)
    assert wire.left
    wire.left()
    assert await task == 0
