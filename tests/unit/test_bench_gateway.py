"""The load of `make bench-gateway` takes no wrong reply for a right one, and its guard fails where it should."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from benchmarks.closed_loop import Kind, Load
from benchmarks.gateway_report import print_quick
from benchmarks.instant_engine import Connection
from benchmarks.loadgen import LoadError
from benchmarks.profile import summed

PLAIN, STREAM = Kind("plain", 3), Kind("stream", 3, stream=True)
SHORT_S = 0.05


def chunked(*events: str) -> bytes:
    frames = b"".join(b"%x\r\n%b\r\n" % (len(data), data) for data in (f"data: {each}\n\n".encode() for each in events))
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + frames + b"0\r\n\r\n"


def whole(text: str, status: str = "200 OK") -> bytes:
    body = f'{{"choices":[{{"message":{{"content":"{text}"}}}}]}}'.encode()
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def token(word: str) -> str:
    return f'{{"choices":[{{"delta":{{"content":"{word}"}}}}]}}'


@contextlib.asynccontextmanager
async def engine() -> AsyncIterator[str]:
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("kind", [PLAIN, STREAM, Kind("paced", 3, stream=True, pace_s=0.002)])
async def test_the_instant_engine_answers_the_load_rightly(kind: Kind) -> None:
    async with engine() as url:
        run = await Load(url, "any", kind, 4).run(SHORT_S)
    assert not run.errors
    assert len(run.replies) >= 4
    if kind.pace_s:
        assert all(reply.total_s >= 2 * kind.pace_s for reply in run.replies)


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        (PLAIN, whole("t000 t001")),
        (PLAIN, whole("t000 t002 t001")),
        (PLAIN, whole("t000 t001 t002 t003")),
        (PLAIN, whole("t000 t001 t002", "503 X")),
        (STREAM, chunked(token("t000"), token(" t001"), "[DONE]")),
        (STREAM, chunked(token("t000"), token(" t001"), token(" t001"), token(" t002"), "[DONE]")),
        (STREAM, chunked(token("t000"), token(" t001"), token(" t002"))),
        (STREAM, chunked(token("t000"), token(" t001"), token(" t002"), "[DONE]", "[DONE]")),
    ],
    ids=["lost", "reordered", "too many", "status", "lost in a stream", "doubled", "no end", "two ends"],
)
def test_a_wrong_reply_is_found(kind: Kind, raw: bytes) -> None:
    load = Load("http://127.0.0.1:1", "any", kind, 1)
    assert load.problem(raw)


def test_a_right_reply_is_right() -> None:
    assert not Load("http://127.0.0.1:1", "any", PLAIN, 1).problem(whole("t000 t001 t002"))
    raw = chunked(token("t000"), token(" t001"), token(" t002"), "[DONE]")
    assert not Load("http://127.0.0.1:1", "any", STREAM, 1).problem(raw)


async def test_a_connection_that_breaks_is_an_error_and_ends_the_run() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        run = await Load(f"http://127.0.0.1:{port}", "any", PLAIN, 2).run(SHORT_S)
    assert run.errors == {"the connection broke": 2}


def test_no_load_leaves_this_machine() -> None:
    with pytest.raises(LoadError):
        Load("http://192.0.2.1:80", "any", PLAIN, 1)


def test_the_guard_fails_past_its_margin_and_on_a_wrong_reply() -> None:
    stored = {"plain": 10.0, "stream": 2.0, "margin": 1.3}
    assert print_quick({"plain": [9, 12.9, 30], "stream": [2.0]}, stored, {})
    assert not print_quick({"plain": [13.1], "stream": [2.0]}, stored, {})
    assert not print_quick({"plain": [10.0], "stream": [2.7]}, stored, {})
    assert not print_quick({"plain": [10.0], "stream": [2.0]}, stored, {"wrong tokens": 1})


def test_a_sample_belongs_to_the_innermost_stage_of_its_stack() -> None:
    front = "run (serve_app/router/listener.py:9);data_received (uvicorn/protocols/http/httptools_impl.py:8)"
    profile = summed(
        [
            "_bootstrap (threading.py:1);main_loop (ray/_private/worker.py:2) 1",
            "run (serve_app/router/listener.py:9) 2",
            f"{front} 1",
            f"{front};__call__ (serve_app/router/generate.py:5) 3",
            f"{front};__call__ (serve_app/router/generate.py:5);loads (json/decoder.py:7) 3",
        ]
    )
    assert profile.samples == 10
    assert dict(profile.stages) == {
        "router/generate.py": 0.6,
        "event loop and sockets (uvloop)": 0.2,
        "uvicorn (server)": 0.1,
        "other threads (Ray Serve, audit)": 0.1,
    }
