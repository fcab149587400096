"""Where records are written: files within bounds, standard output, a collector; and what cannot be written."""

from __future__ import annotations

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
from front import audited, body, front, until
from hypothesis import given
from hypothesis import strategies as st
from scripted_upstream import answer

from serve_app.service_schema import AuditSettings
from serve_app.telemetry.audit import Audit, read_records
from serve_app.telemetry.audit_files import Closed, surplus

OK = answer(200, {"choices": [{"finish_reason": "stop"}]})


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


async def test_directory_that_cannot_be_made_fails_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    async with front(OK, **audited(tmp_path / "file" / "audit")) as (app, _):
        assert (await Call(app, body()).done()).status == 200
        await until(lambda: app._audit.dropped == 1)
    assert "cannot be made" in caplog.text


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
