"""`python -m serve_app status --watch`: what it shows of a feed, on a terminal and in a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from front import DONE, HOT, body
from front_door import connected, front_doors, request
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from test_status import CARD
from test_traffic import BEGAN, record

from serve_app.status import Status, rendered
from serve_app.telemetry.traffic import Traffic
from serve_app.watch import Lines, ago, bars, screen
from serve_app.watched import Watched

PATIENCE_S = 30.0
MODEL = {
    "id": "hot[1]",
    "tier": "resident",
    "state": "awake",
    "phase": None,
    "progress": None,
    "error": None,
    "replicas": [{"id": "abc", "node": "node-1", "state": "awake"}],
    "running": 3,
    "waiting": 1,
    "queued": 2,
    "last_used_s": 125.0,
    "wake_s": None,
    "gpu_bytes": 4_200_000_000,
    "host_bytes": None,
    "pinned": False,
}
COLD = {
    **MODEL,
    "id": "cold",
    "tier": "lazy",
    "state": "loading",
    "phase": "warming",
    "progress": 0.4,
    "replicas": [{"id": "def", "node": None, "state": "loading"}],
    "wake_s": 12.2,
    "pinned": True,
    "last_used_s": None,
}
POOL = {"gpu_used": 6_000_000_000, "gpu_budget": 20_000_000_000, "host_used": 0, "host_budget": 30_000_000_000}
NODES = [
    {"id": "node-1", "name": "gpu-1", "gpus": 8, "gpus_used": 4.5},
    {"id": "node-2", "name": "cpu-1", "gpus": 0, "gpus_used": 0},
]


def watched(*models: dict[str, Any], traffic: Traffic | None = None, now: float = BEGAN) -> Watched:
    found = Watched()
    found.take("hello", {"version": "0.1.0", "policy": "abc", "router": "r1", "admin": True})
    found.take("models", {"at": now, "models": list(models or (MODEL, COLD)), "pool": POOL, "nodes": NODES})
    traffic = traffic or Traffic(BEGAN)
    found.take("traffic", {"step_s": 5, "points": traffic.points(now)})
    found.take("requests", {"requests": traffic.latest(50)})
    return found


def busy() -> Traffic:
    """Ten seconds of ten requests a second, and five of twenty that are refused."""
    traffic = Traffic(BEGAN)
    for number in range(100):
        traffic.take(record(BEGAN + number / 10, rule="poems" if number % 2 else None))
    for number in range(20):
        refused = {"status": 503, "error": "overloaded", "model": None, "ttft_ms": None, "completion_tokens": 0}
        traffic.take(record(BEGAN + 10 + number / 10, **refused))
    return traffic


def shown(what: Any, width: int = 100) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def test_the_screen_says_what_models_do_and_where() -> None:
    lines = shown(screen(watched(), "")).splitlines()
    assert lines[0].split() == ["switchyard", "0.1.0", "configuration", "abc", "router", "r1"]
    assert lines[3].split() == ["hot[1]", "resident", "awake", "3", "3", "4.2", "2m"]
    assert lines[4].split() == ["cold", "lazy", "warming", "40%", "(pinned)", "3", "3", "4.2", "12"]
    assert lines[5] == "replicas: hot[1] abc on gpu-1; cold def loading"
    assert lines[6] == "pool: 6.0 of 20.0 GB, 0 of 30.0 GB host"
    assert lines[7] == "nodes: gpu-1 (4.5 of 8 GPUs), cpu-1"


def test_a_model_ages_though_nothing_is_said_of_it() -> None:
    found = watched({**MODEL, "running": 0, "last_used_s": 3.0})
    assert shown(screen(found, "")).splitlines()[3].split()[-1] == "3s"
    found.take("traffic", {"step_s": 5, "points": Traffic(BEGAN).points(BEGAN + 40)})
    assert shown(screen(found, "")).splitlines()[3].split()[-1] == "43s"


def test_the_screen_sums_the_traffic_up() -> None:
    text = shown(screen(watched(traffic=busy(), now=BEGAN + 16), ""))
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert lines["requests/s"][1] == "8.0"
    assert float(lines["TTFT"][3]) == pytest.approx(20, rel=0.02)
    assert "120 requests, 0 failed, 20 overloaded, 0 thought; model by: 100 default" in text
    newest = text.splitlines()[-1].split()
    assert newest[1:] == ["overloaded", "503", "120", "0"]


def test_the_screen_fits_a_terminal_of_80_columns_and_says_what_is_wrong() -> None:
    failed = {**COLD, "state": "failed", "phase": None, "progress": None, "error": "no memory"}
    text = shown(screen(watched(MODEL, failed), "http://x: no answer"), width=80)
    assert "http://x: no answer; trying again" in text
    assert "cold: no memory" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_lines_tell_changes_and_steps_once() -> None:
    traffic, told = busy(), watched(now=BEGAN + 1)
    lines = Lines(told)
    assert [line[9:] for line in lines.new("")] == ["hot[1]: awake", "cold: loading"]
    told.take(
        "models",
        {"at": BEGAN, "models": [{**COLD, "state": "failed", "error": "no memory"}], "pool": None, "nodes": []},
    )
    told.take("traffic", {"step_s": 5, "points": traffic.points(BEGAN + 16)})
    found = [line[9:] for line in lines.new("")]
    assert found[:2] == ["cold: failed: no memory", "hot[1]: no longer configured"]
    assert [line.split(",")[0] for line in found[2:]] == ["4.0 requests/s"]
    told.take("traffic", {"step_s": 5, "points": traffic.points(BEGAN + 26)})
    assert [line[9:] for line in lines.new("")] == ["0.0 requests/s, 0 tokens/s"] * 2
    assert [line[9:] for line in lines.new("gone")] == ["gone; trying again"]
    assert list(lines.new("gone")) == []
    assert [line[9:] for line in lines.new("")] == ["connected again"]


def test_plain_status_says_where_things_run_and_how_much_there_is_to_do() -> None:
    status = Status(True, "moving", "abc", "", [CARD], watched(traffic=busy(), now=BEGAN + 16))
    lines = shown(rendered(status), width=160).splitlines()
    assert lines[3:6] == [
        "replicas: hot[1] abc on gpu-1; cold def loading",
        "pool: 6.0 of 20.0 GB, 0 of 30.0 GB host",
        "nodes: gpu-1 (4.5 of 8 GPUs), cpu-1",
    ]
    assert lines[6].startswith("traffic: 8.0 requests/s, 73 tokens/s, TTFT p50 20 ms, in 15 minutes 120 requests")
    assert '"requests_per_s": 8.0' in status.as_json()


def test_points_are_replaced_and_a_new_hello_begins_anew() -> None:
    found = Watched()
    found.take("traffic", {"step_s": 5, "points": [{"t": 0, "requests": 1}, {"t": 5, "requests": 2}]})
    found.take("traffic", {"step_s": 5, "points": [{"t": 5, "requests": 3}, {"t": 10, "requests": 0}]})
    assert [point["requests"] for point in found.points] == [1, 3, 0]
    found.take("of a newer service", {})
    found.take("hello", {})
    assert found.points == []


@given(st.lists(st.none() | st.floats(0, 1e6)), st.integers(1, 50))
def test_bars_show_the_greatest_and_stay_within_their_width(values: list[float | None], width: int) -> None:
    line = bars(values, width)
    assert len(line) <= width
    assert ("█" in line) == any(values)


def test_times_are_short() -> None:
    assert [ago(seconds) for seconds in (0, 5, 119, 7200, 90_000)] == ["now", "5s", "2m", "2h", "1d"]


# Against a running front door


class Shown:
    """What the command has written so far."""

    def __init__(self) -> None:
        self.text = ""
        self.news = asyncio.Event()

    def add(self, data: bytes) -> None:
        self.text += data.decode()
        self.news.set()

    async def until(self, condition: Callable[[str], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition(self.text):
                self.news.clear()
                await self.news.wait()


@contextlib.asynccontextmanager
async def status_watch(port: int, output: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command, asking that front door; its output goes into a file of that number, which is closed here."""
    command = [sys.executable, "-m", "serve_app", "status", "--watch", "--url", f"http://127.0.0.1:{port}"]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**os.environ, "COLUMNS": "100"},
        # A shell's background job ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(output)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@contextlib.contextmanager
def read(source: int) -> Any:
    found, loop = Shown(), asyncio.get_running_loop()

    def some() -> None:
        try:
            data = os.read(source, 65536)
        except OSError:  # a terminal's way to say that its last user has left
            data = b""
        if data:
            found.add(data)
        else:
            loop.remove_reader(source)

    loop.add_reader(source, some)
    try:
        yield found
    finally:
        loop.remove_reader(source)
        os.close(source)


async def ended_by_ctrl_c(process: asyncio.subprocess.Process) -> int:
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(PATIENCE_S):
        return await process.wait()


async def test_in_a_pipe_it_says_when_the_service_is_gone_and_that_it_is_back() -> None:
    source, sink = os.pipe()
    with read(source) as output:
        async with contextlib.AsyncExitStack() as stack:
            async with front_doors(DONE) as ((door,), _):
                process = await stack.enter_async_context(status_watch(door.port, sink))
                await output.until(lambda text: f"{HOT}: awake" in text)
            await output.until(lambda text: "trying again" in text)
            async with front_doors(DONE, router={"port": door.port}):
                await output.until(lambda text: "connected again" in text)
                assert await ended_by_ctrl_c(process) == 0
        assert "\x1b" not in output.text
        assert "Traceback" not in output.text


async def test_on_a_terminal_it_is_drawn_in_place_and_leaves_the_terminal_as_it_was() -> None:
    source, sink = pty.openpty()
    with read(source) as output:
        async with front_doors(DONE) as ((door,), _), status_watch(door.port, sink) as process:
            await output.until(lambda text: "15 minutes" in text)
            async with connected(door) as connection:
                await connection.send(request(body()))
                assert (await connection.answer())[0] == 200
            await output.until(lambda text: "1 requests, 0 failed" in text)
            assert await ended_by_ctrl_c(process) == 0
        up, hidden, back = "\x1b[1A", "\x1b[?25l", "\x1b[?25h"
        assert up in output.text
        assert output.text.rindex(back) > output.text.index(hidden)
        assert "Traceback" not in output.text
