"""Clients that leave at an awkward moment, over real sockets: the engine is let go whatever the moment was."""

from __future__ import annotations

import pytest
from front import body, until
from front_door import connected, front_doors, request
from scripted_upstream import event, silent, stream

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
