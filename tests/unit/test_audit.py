"""The record that every request leaves, what becomes of it when it cannot be written, and what is added up from it."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from asgi_call import Call
from front import Places, audited, body, by, event, front, key, until, usage_event
from hypothesis import given
from hypothesis import strategies as st
from scripted_upstream import DONE, answer, hang_up, silent, stream
from typer.testing import CliRunner

from serve_app.cli import app as cli
from serve_app.service_schema import AuditSettings
from serve_app.telemetry.audit import Audit, read_records, since_of, usage
from serve_app.telemetry.audit_files import Closed, surplus

PROMPT = "my-private-words"
OK = answer(
    200,
    {
        "choices": [{"finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 5,
            "completion_tokens_details": {"reasoning_tokens": 2},
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    },
)
LAST = b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n'
STREAM = stream(event("a"), LAST, usage_event(prompt_tokens=7, completion_tokens=5), DONE)


def only_record(directory: Path) -> dict[str, Any]:
    """What the closed audit of one request wrote: one record, without the prompt and the key."""
    text = "".join(path.read_text() for path in directory.iterdir())
    assert PROMPT not in text
    assert "k-key" not in text
    (record,) = read_records(directory)
    return record


# One record for every ending


@pytest.mark.parametrize("streaming", [False, True])
async def test_answer_is_recorded_with_what_it_cost(tmp_path: Path, streaming: bool) -> None:
    keys = {"security": {"keys": [key("k", max_priority=3)]}}
    async with front(STREAM if streaming else OK, **keys, **audited(tmp_path)) as (app, _):
        call = await Call(app, body(PROMPT, stream=streaming, priority=2), headers=by("k")).done()
    record = only_record(tmp_path)
    expected = {
        "key": "k",
        "path": "/v1/chat/completions",
        "stream": streaming,
        "priority": 2,
        "status": 200,
        "error": None,
        "model": "hot",
        "model_source": "default",
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "finish": "length" if streaming else "stop",
        "replica": "hot-0",
        "request": call.headers["x-request-id"],
    }
    assert {name: record[name] for name in expected} == expected
    assert 0 < record["ttft_ms"] <= record["total_ms"] < 5000
    assert 0 < record["engine_ms"] <= record["total_ms"]
    assert abs(record["at"] - time.time()) < 60
    if not streaming:
        assert (record["reasoning_tokens"], record["cached_tokens"]) == (2, 4)


@pytest.mark.parametrize(
    ("call", "status", "error"),
    [
        ({"body": b"{not " + PROMPT.encode()}, 400, "invalid_json"),
        ({"body": body(PROMPT), "headers": {"content-type": "text/plain"}}, 415, "unsupported_media_type"),
        ({"body": body(PROMPT, model="nope")}, 404, "model_not_found"),
        ({"body": body(PROMPT, priority="x")}, 400, None),
        ({"body": body(PROMPT), "headers": {"authorization": "Bearer stolen-k-key"}}, 401, "invalid_api_key"),
        ({"body": body(PROMPT), "headers": {"authorization": ""}}, 401, "missing_api_key"),
        ({"body": b"{not " + PROMPT.encode(), "path": "/v1/responses"}, 400, None),
        ({"body": {"input": PROMPT, "previous_response_id": 1}, "path": "/v1/responses"}, 400, None),
    ],
)
async def test_refused_request_is_recorded_once(tmp_path: Path, call: dict[str, Any], status: int, error: str) -> None:
    async with front(OK, security={"keys": [key("k")]}, **audited(tmp_path)) as (app, _):
        refused = await Call(app, **{**call, "headers": by("k") | call.get("headers", {})}).done()
    record = only_record(tmp_path)
    assert (refused.status, record["status"], record["path"]) == (status, status, call.get("path", record["path"]))
    assert record["key"] == ("" if status == 401 else "k")
    assert record["request"] == refused.headers.get("x-request-id", "")
    assert error is None or record["error"] == error
    assert (record["engine_ms"], record["prompt_tokens"]) == (None, 0)


async def test_what_is_no_request_to_a_model_is_not_recorded(tmp_path: Path) -> None:
    async with front(OK, **audited(tmp_path)) as (app, _):
        for path in ("/health", "/v1/models", "/nowhere"):
            await Call(app, path=path, method="GET").done()
    assert list(read_records(tmp_path)) == []


async def test_429_is_recorded(tmp_path: Path) -> None:
    limits = {"security": {"keys": [key("k", requests_per_minute=1)]}}
    async with front(OK, **limits, **audited(tmp_path)) as (app, _):
        for _ in range(2):
            await Call(app, body(PROMPT), headers=by("k")).done()
    records = list(read_records(tmp_path))
    assert [(record["status"], record["error"]) for record in records] == [(200, None), (429, "rate_limit_exceeded")]


async def test_full_queue_and_full_router_are_recorded_and_cost_no_engine_time(tmp_path: Path) -> None:
    engine = Places(1)
    limits = {"model": {"queue": {"size": 1, "wait_s": 0.2}}, "router": {"max_in_flight": 2}}
    async with front(engine, **limits, **audited(tmp_path)) as (app, _):
        first = Call(app, body(PROMPT))
        await until(lambda: engine.taken == 1)
        late = Call(app, body(PROMPT))
        await until(lambda: len(app._lines["hot"]) == 1)
        assert (await Call(app, body(PROMPT)).done()).status == 503
        assert (await late.done()).status == 503
        engine.end()
        await first.done()
    full, late_record, served = read_records(tmp_path)
    assert [record["status"] for record in (full, late_record, served)] == [503, 503, 200]
    assert [record["error"] for record in (full, late_record)] == ["overloaded", "overloaded"]
    assert (late_record["engine_ms"], late_record["queue_ms"] > 150) == (None, True)
    assert served["engine_ms"] > 150


@pytest.mark.parametrize(
    ("script", "streaming", "status", "error"),
    [
        (hang_up, False, 503, "engine_died"),
        (stream(event("a"), end="cut"), True, 200, "engine_died"),
        (answer(500, {}), False, 503, "engine_error"),
        (answer(400, {"error": {"message": PROMPT}}), False, 400, "invalid_value"),
    ],
)
async def test_engine_that_fails_is_recorded(
    tmp_path: Path, script: Any, streaming: bool, status: int, error: str
) -> None:
    async with front(script, **audited(tmp_path)) as (app, _):
        await Call(app, body(PROMPT, stream=streaming)).done()
    record = only_record(tmp_path)
    assert (record["status"], record["error"], record["replica"]) == (status, error, "hot-0")


@pytest.mark.parametrize(("script", "status"), [(silent, 499), (stream(event("a"), end="stall"), 200)])
async def test_client_that_leaves_is_recorded(tmp_path: Path, script: Any, status: int) -> None:
    async with front(script, **audited(tmp_path)) as (app, (upstream,)):
        call = Call(app, body(PROMPT, stream=True))
        await asyncio.wait_for(upstream.arrived.wait(), 5)
        if status == 200:
            await call.until(lambda call: len(call.messages) > 1)
        call.disconnect()
        await call.done()
    record = only_record(tmp_path)
    assert (record["status"], record["error"]) == (status, "client_left")


async def test_request_that_a_shutdown_ends_is_recorded(tmp_path: Path) -> None:
    async with front(stream(event("a"), end="stall"), **audited(tmp_path)) as (app, _):
        call = Call(app, body(PROMPT, stream=True))
        await call.until(lambda call: len(call.messages) > 1)
        call._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call.done()
    record = only_record(tmp_path)
    assert (record["status"], record["error"]) == (200, "shutting_down")


# Records that cannot be written


def settings(directory: Path | str, **more: Any) -> AuditSettings:
    return AuditSettings(sink="file", directory=str(directory), **more)


def on_full_disk(directory: Path, **more: Any) -> Audit:
    """An audit whose file is /dev/full, where there is no space."""
    audit = Audit(settings(directory), **more).start()
    assert audit._listener
    handler: Any = audit._listener.handlers[0]
    handler.path = Path("/dev/full")
    return audit


def test_full_disk_drops_and_counts_and_nobody_waits(tmp_path: Path) -> None:
    lost: list[None] = []
    audit = on_full_disk(tmp_path, lost=lambda: lost.append(None))
    began = time.monotonic()
    for number in range(1000):
        audit.write({"at": 1.0, "request": str(number)})
    assert time.monotonic() - began < 0.5
    audit.close()
    assert audit.dropped == len(lost) == 1000


async def test_full_disk_fails_no_request(tmp_path: Path) -> None:
    async with front(OK, **audited(tmp_path)) as (app, _):
        assert app._audit._listener
        handler: Any = app._audit._listener.handlers[0]
        handler.path = Path("/dev/full")
        assert [(await Call(app, body()).done()).status for _ in range(3)] == [200] * 3
        await until(lambda: app._audit.dropped == 3)


def test_what_was_counted_as_lost_does_not_come_later_in_pieces(tmp_path: Path) -> None:
    audit = on_full_disk(tmp_path)
    assert audit._listener
    for number in range(300):
        audit.write({"at": float(number), "request": "x" * 100})
    deadline = time.monotonic() + 5
    while audit.dropped < 300 and time.monotonic() < deadline:
        os.sched_yield()
    handler: Any = audit._listener.handlers[0]
    handler.path = tmp_path / "audit-free-again.jsonl"
    audit.write({"at": 999.0})
    audit.close()
    assert (audit.dropped, (tmp_path / "audit-free-again.jsonl").read_text()) == (300, '{"at":999.0}\n')


def test_directory_that_vanished_drops_and_counts_and_comes_back(tmp_path: Path) -> None:
    audit = Audit(settings(tmp_path / "gone")).start()
    (tmp_path / "gone").rmdir()
    audit.write({"at": 1.0})
    deadline = time.monotonic() + 5
    while not audit.dropped and time.monotonic() < deadline:
        os.sched_yield()
    assert audit.dropped == 1
    (tmp_path / "gone").mkdir()
    audit.write({"at": 2.0})
    audit.close()
    assert [record["at"] for record in read_records(tmp_path / "gone")] == [2.0]


def test_full_queue_drops_and_counts_and_the_end_still_writes_what_is_queued(tmp_path: Path) -> None:
    audit = Audit(settings(tmp_path, queue=2)).start()
    assert audit._listener
    handler: Any = audit._listener.handlers[0]
    handler.acquire()  # the disk takes its time
    try:
        for number in range(10):
            audit.write({"at": float(number)})
        assert audit.dropped in (7, 8)
        pool = ThreadPoolExecutor()
        closing = pool.submit(audit.close)
    finally:
        handler.release()
    closing.result(10)
    pool.shutdown()
    assert len(list(read_records(tmp_path))) + audit.dropped == 10


@pytest.mark.parametrize("size", [5, 50])
def test_disk_that_hangs_does_not_hang_the_shutdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("serve_app.telemetry.audit._CLOSE_S", 0.2)
    audit = Audit(settings(tmp_path, queue=size)).start()
    assert audit._listener
    handler: Any = audit._listener.handlers[0]
    with handler.lock, ThreadPoolExecutor() as pool:
        for number in range(10):
            audit.write({"at": float(number)})
        pool.submit(audit.close).result(5)
        assert audit.dropped >= 9


def test_record_that_is_no_json_is_dropped_and_the_next_one_written(tmp_path: Path) -> None:
    audit = Audit(settings(tmp_path)).start()
    audit.write({"at": object()})
    audit.write({"at": 2.0})
    audit.close()
    assert (audit.dropped, [record["at"] for record in read_records(tmp_path)]) == (1, [2.0])


def test_files_are_rotated_and_only_so_many_kept(tmp_path: Path) -> None:
    audit = Audit(settings(tmp_path, max_bytes=1024, keep=3)).start()
    for number in range(200):
        audit.write({"at": float(number), "request": "x" * 50})
    audit.close()
    files = list(tmp_path.iterdir())
    assert len(files) == 4
    assert all(path.stat().st_size <= 1024 for path in files)
    kept = sorted(record["at"] for record in read_records(tmp_path))
    assert kept == [float(number) for number in range(200 - len(kept), 200)]


def test_two_audits_of_one_process_do_not_rotate_each_others_files(tmp_path: Path) -> None:
    audits = [Audit(settings(tmp_path, max_bytes=1024, keep=100)).start() for _ in range(2)]
    for number in range(200):
        audits[number % 2].write({"at": float(number), "request": "x" * 50})
    for audit in audits:
        audit.close()
    assert sorted(record["at"] for record in read_records(tmp_path)) == [float(number) for number in range(200)]
    for path in tmp_path.iterdir():
        assert len({json.loads(line)["at"] % 2 for line in path.read_text().splitlines()}) == 1


def test_files_of_ended_processes_go_when_the_directory_has_too_much(tmp_path: Path) -> None:
    for number in range(6):
        old = tmp_path / f"audit-gone-{number}.jsonl"
        old.write_text(json.dumps({"at": float(number), "request": "x" * 1000}) + "\n")
        os.utime(old, (number, number))
    (tmp_path / "notes.txt").write_text("x" * 9000)
    audit = Audit(settings(tmp_path, max_bytes=1100, keep=3)).start()
    audit.write({"at": 10.0})
    audit.close()
    assert sorted(record["at"] for record in read_records(tmp_path)) == [3.0, 4.0, 5.0, 10.0]
    assert (tmp_path / "notes.txt").exists()


_WRITER = """
import sys
from pathlib import Path
from serve_app.service_schema import AuditSettings
from serve_app.telemetry.audit import Audit, read_records
audit = Audit(AuditSettings(sink="file", directory=sys.argv[1], max_bytes=4096, keep=20)).start()
audit.write({"at": float(sys.argv[2]), "first": True, "request": "x"})
for turn, line in enumerate(sys.stdin):
    for number in range(int(line)):
        audit.write({"at": float(sys.argv[2]), "request": "x" * 200})
    last = {"at": 9.0, "by": sys.argv[2], "turn": turn}
    audit.write(last)
    while last not in read_records(Path(sys.argv[1])):
        pass
    print("written", flush=True)
audit.close()
assert not audit.dropped
"""


def test_processes_that_share_a_directory_keep_it_within_bounds_and_remove_nothing_in_use(tmp_path: Path) -> None:
    """The third only looks on: its file is the oldest and stays, since it goes on writing there."""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]

    def have_written(numbers: Iterable[int], count: int) -> None:
        for number in numbers:
            pipe = writers[number].stdin
            assert pipe
            pipe.write(f"{count}\n")
            pipe.flush()
        for number in numbers:
            out = writers[number].stdout
            assert out
            assert out.readline() == "written\n"

    have_written([2], 0)
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    have_written([0, 1], 1000)  # 440 kB, in files of 4 kB
    files = [path.stat().st_size for path in tmp_path.iterdir()]
    # What is closed, and what each of them writes at the moment.
    assert 15 * 4096 < sum(files) <= 23 * 4096
    have_written([2], 5)
    for writer in writers:
        writer.communicate(timeout=20)
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert len([record for record in read_records(tmp_path) if record["at"] == 2.0]) == 6


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 50))), st.integers(0, 200), st.integers(1, 20))
def test_the_oldest_files_go_and_no_more_than_must(
    files: list[tuple[int, int]], most_bytes: int, most_files: int
) -> None:
    closed = [Closed(float(at), f"{number:03}", size) for number, (at, size) in enumerate(files)]
    gone = surplus(closed, most_bytes, most_files)
    ordered = sorted(closed, key=lambda file: (file.at, file.name))
    left = ordered[len(gone) :]
    assert gone == [file.name for file in ordered[: len(gone)]]
    assert sum(file.size for file in left) <= most_bytes or not left
    assert len(left) <= most_files
    if gone:
        more = ordered[len(gone) - 1 :]
        assert sum(file.size for file in more) > most_bytes or len(more) > most_files


_SHORT_OF_SPACE = """
import resource, sys
from serve_app.service_schema import AuditSettings
from serve_app.telemetry.audit import Audit

def may_take(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def wait(condition):
    while not condition():
        pass

audit = Audit(AuditSettings(sink="file", directory=sys.argv[1])).start()
may_take(100)  # the kernel takes what fits, and says at the next call that there is no more room
for number in range(3):
    audit.write({"at": float(number), "request": "x" * 40})
wait(lambda: audit.dropped == 2)
may_take(resource.RLIM_INFINITY)
audit.write({"at": 3.0})
audit.close()
"""


def test_record_that_a_full_disk_took_in_part_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _SHORT_OF_SPACE, str(tmp_path)], check=True, timeout=60)
    assert [record["at"] for record in read_records(tmp_path)] == [0.0, 3.0]
    assert all(json.loads(line) for path in tmp_path.iterdir() for line in path.read_text().splitlines())


def test_file_that_somebody_removed_is_begun_anew(tmp_path: Path) -> None:
    audit = Audit(settings(tmp_path)).start()
    audit.write({"at": 1.0})
    deadline = time.monotonic() + 5
    while not list(read_records(tmp_path)) and time.monotonic() < deadline:
        os.sched_yield()
    for path in tmp_path.iterdir():
        path.unlink()
    audit.write({"at": 2.0})
    audit.close()
    assert [record["at"] for record in read_records(tmp_path)] == [2.0]


def test_sink_none_writes_nothing(tmp_path: Path) -> None:
    audit = Audit(AuditSettings(sink="none", directory=str(tmp_path / "x")))
    audit.write({"at": 1.0})
    audit.close()
    assert (audit.dropped, list(tmp_path.iterdir())) == (0, [])


def test_stdout_gets_one_line_for_each_record() -> None:
    code = (
        "from serve_app.service_schema import AuditSettings; from serve_app.telemetry.audit import Audit\n"
        "audit = Audit(AuditSettings(sink='stdout')).start()\n"
        "for n in range(3): audit.write({'at': n})\n"
        "audit.close()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{"at": 0}, {"at": 1}, {"at": 2}]


# A collector


@contextlib.contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """An OTLP/HTTP collector on this machine; keeps the bodies that it gets."""
    bodies: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["content-length"]))
            bodies.append(gzip.decompress(raw) if self.headers.get("content-encoding") == "gzip" else raw)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/logs", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_collector_gets_every_record_before_the_end() -> None:
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

    with collector() as (endpoint, bodies):
        audit = Audit(AuditSettings(sink="otlp", otlp_endpoint=endpoint), endpoint).start()
        for number in range(5):
            audit.write({"at": float(number), "key": "k", "error": None})
        audit.close()
        found = []
        for raw in bodies:
            for resource in ExportLogsServiceRequest.FromString(raw).resource_logs:
                (name,) = [
                    each.value.string_value for each in resource.resource.attributes if each.key == "service.name"
                ]
                assert name == "switchyard"
                found += [
                    json.loads(log.body.string_value) for scope in resource.scope_logs for log in scope.log_records
                ]
    assert found == [{"at": float(number), "key": "k", "error": None} for number in range(5)]


# What is added up


def record(**fields: Any) -> dict[str, Any]:
    base = {"at": 1.0, "key": "a", "model": "hot", "status": 200, "prompt_tokens": 0, "completion_tokens": 0}
    return {**base, **fields}


def test_usage_adds_up_by_key_and_model_and_the_largest_comes_first() -> None:
    rows = usage(
        [
            record(prompt_tokens=1, completion_tokens=2, reasoning_tokens=1, cached_tokens=1, engine_ms=1500.0),
            record(prompt_tokens=10, completion_tokens=20, engine_ms=600.0),
            record(key="b", prompt_tokens=100, completion_tokens=1, engine_ms=None),
            record(key="b", status=429),
            record(key="b", status=499),
        ],
        ["key", "model"],
    )
    assert [row["key"] for row in rows] == ["b", "a"]
    small = rows[1]
    assert (small["requests"], small["refused"], small["engine_s"]) == (2, 0, 2.1)
    assert [small[name] for name in ("prompt_tokens", "completion_tokens", "reasoning_tokens", "cached_tokens")] == [
        11,
        22,
        1,
        1,
    ]
    assert (rows[0]["requests"], rows[0]["refused"], rows[0]["ttft_p50_ms"]) == (3, 2, None)


@pytest.mark.parametrize(
    ("values", "p50", "p99"),
    [([5], 5, 5), ([1, 2], 1, 2), ([3, 1, 2], 2, 3), (list(range(1, 101)), 50, 99), (list(range(1, 1001)), 500, 990)],
)
def test_percentiles_are_the_smallest_value_that_so_many_do_not_exceed(values: list[int], p50: int, p99: int) -> None:
    (row,) = usage([record(ttft_ms=value) for value in values] + [record(ttft_ms=None)], ["key"])
    assert (row["ttft_p50_ms"], row["ttft_p99_ms"]) == (p50, p99)


def test_since_is_a_time_ago_or_a_date() -> None:
    assert [since_of(text, 1_000_000.0) for text in ("30s", "30m", "12h", "7d")] == [999_970, 998_200, 956_800, 395_200]
    assert since_of("2026-01-02T03:04:05+00:00") == 1767323045
    assert since_of("2026-01-02") < since_of("2026-01-03")
    for wrong in ("", "d", "soon", "-1d", "1.5h", "1w", "²d"):
        with pytest.raises(ValueError, match=r".*"):
            since_of(wrong)


def test_faulty_lines_and_old_records_are_skipped(tmp_path: Path) -> None:
    lines = [
        b'{"at": 5}',
        b'{"at": 50}',
        b'{"at": 60',
        b"\xff\xfe",
        b"[1]",
        b"null",
        b'{"at": null}',
        b"",
        b'{"at": 70}',
    ]
    (tmp_path / "audit-x-1.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "other.jsonl").write_bytes(b'{"at": 99}')
    assert [found["at"] for found in read_records(tmp_path, 10)] == [50, 70]


def test_file_that_is_removed_while_the_others_are_read_is_passed_over(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"audit-x-{number}.jsonl").write_text(f'{{"at": {number}}}\n')
    reading = read_records(tmp_path)
    assert next(reading)["at"] == 0
    (tmp_path / "audit-x-1.jsonl").unlink()
    assert [each["at"] for each in reading] == [2]


def command(*args: str) -> Any:
    return CliRunner().invoke(cli, ["usage", *args])


def written(tmp_path: Path) -> Path:
    now = time.time()
    records = [
        record(at=now, key="team-with-a-long-name", prompt_tokens=1234567, completion_tokens=7654321, ttft_ms=12345.6),
        record(at=now, key="b", prompt_tokens=5, engine_ms=98765432.1),
        record(at=now - 7200, key="old", prompt_tokens=3),
    ]
    (tmp_path / "audit-x-1.jsonl").write_text("\n".join(json.dumps(each) for each in records))
    return tmp_path


def test_command_prints_every_number_whole_however_narrow_the_terminal(tmp_path: Path) -> None:
    shown = command("--since", "1h", "--directory", str(written(tmp_path)))
    assert shown.exit_code == 0
    for whole in ("team-with-a-long-name", "1234567", "7654321", "12345.6", "98765.4"):
        assert whole in shown.output
    assert "old" not in shown.output
    assert shown.output.index("team-with") < shown.output.index("\n b ")


def test_command_prints_json_for_another_program(tmp_path: Path) -> None:
    shown = command("--json", "--by", "key", "--directory", str(written(tmp_path)))
    rows = json.loads(shown.output)
    assert [row["key"] for row in rows] == ["team-with-a-long-name", "b", "old"]


def test_command_says_what_is_wrong(tmp_path: Path) -> None:
    wrong = command("--since", "soon", "--directory", str(tmp_path))
    assert (wrong.exit_code, "soon" in wrong.output) == (1, True)
    empty = command("--directory", str(tmp_path))
    assert (empty.exit_code, "no record" in empty.output) == (1, True)
