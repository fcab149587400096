"""The load of `make bench-gateway` takes no wrong reply for a right one, and its guard fails where it should."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest
from front import DONE
from front_door import front_doors

from benchmarks.closed_loop import Kind, Load
from benchmarks.gateway_report import Result, print_quick
from benchmarks.gateway_viewers import compare, watching, worse
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


@pytest.mark.parametrize(
    ("figure", "ratio", "found"),
    [
        ("CPU ms a request", 1.029, False),
        ("CPU ms a request", 1.031, True),
        ("CPU ms a request", 0.5, False),
        ("requests/s", 0.971, False),
        ("requests/s", 0.969, True),
        ("requests/s", 2.0, False),
    ],
)
def test_viewers_may_change_three_percent_for_the_worse(figure: str, ratio: float, found: bool) -> None:
    assert worse(figure, ratio) == found


def result(gateway_ms: float) -> Result:
    return Result(
        side="router",
        kind="plain",
        connections=16,
        round=0,
        replies=1,
        errors={},
        per_s=1000.0,
        gateway_ms=gateway_ms,
        cpu_ms={},
        p50_ms=3.0,
        p99_ms=4.0,
        ttft_p50_ms=3.0,
        span_p50_ms=1.0,
        worst_gap_ms=0.0,
        longest_gap_ms=0.0,
        rss_mib=0.0,
        peak_rss_mib=0.0,
        gateway_cores=0.5,
        other_cores=0.0,
    )


@pytest.mark.parametrize(("watched_ms", "holds"), [(0.202, True), (0.21, False)])
async def test_runs_with_viewers_are_held_against_their_neighbours_without(
    watched_ms: float, holds: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[int, int]] = []

    def run(kind: Kind, connections: int, number: int, viewers: list[int]) -> Result:
        deadline = time.monotonic() + 5
        while door.app._feed.viewers != len(viewers) * 5 and time.monotonic() < deadline:
            time.sleep(0.01)  # those of the last run are on their way out
        seen.append((number, door.app._feed.viewers))
        return result(watched_ms if viewers else 0.2)

    cells = [(PLAIN, 16, ("CPU ms a request", "requests/s"))]
    async with front_doors(DONE) as ((door,), _):
        assert await asyncio.to_thread(compare, run, door.base_url, 5, cells, 2) == holds
    assert seen == [(-1, 0), (-1, 5), (0, 5), (0, 0), (1, 0), (1, 5)]
    assert ("PASS" if holds else "FAIL") in capsys.readouterr().out.splitlines()[-1]


async def test_viewers_that_are_not_let_in_are_no_measurement() -> None:
    def watch(url: str) -> None:
        with watching(url, 3):
            pass

    async with front_doors(DONE, router={"viewers": 2}) as ((door,), _):
        with pytest.raises(LoadError):
            await asyncio.to_thread(watch, door.base_url)
