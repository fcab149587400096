"""Files and batches on a disk that is killed between any two of its steps: nothing is lost, nothing is doubled."""

import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from serve_app.batches.disk import Disk
from serve_app.batches.ledger import Ledger, Result
from serve_app.batches.plan import Bounds
from serve_app.batches.state import FINAL, moved
from serve_app.batches.store import Store
from serve_app.errors import ApiError

CHAT = "/v1/chat/completions"
KEEP_S = 1000.0


class Killed(BaseException):
    """The process was killed here: no `except Exception` of ours runs then."""


class MortalDisk(Disk):
    """Dies at the `last` step. A step may be done, not done, or half done."""

    def __init__(self, last: int, *, done: bool) -> None:
        self.left = last
        self.done = done

    def _step(self, step: Callable[[], Any], half: Callable[[], object] = lambda: None) -> Any:
        self.left -= 1
        if self.left > 0:
            return step()
        if self.done:
            step()
        else:
            half()
        raise Killed

    def copy(self, path: Path, source: BinaryIO) -> int:
        return int(self._step(lambda: super(MortalDisk, self).copy(path, source)))

    def link(self, source: Path, path: Path) -> None:
        self._step(lambda: super(MortalDisk, self).link(source, path))

    def rename(self, temporary: Path, path: Path) -> None:
        self._step(lambda: super(MortalDisk, self).rename(temporary, path))

    def append(self, descriptor: int, data: bytes) -> None:
        torn = data[: len(data) // 2 + 1]
        self._step(lambda: super(MortalDisk, self).append(descriptor, data), lambda: os.write(descriptor, torn))

    def cut(self, descriptor: int, size: int) -> None:
        self._step(lambda: super(MortalDisk, self).cut(descriptor, size))

    def remove(self, path: Path) -> None:
        self._step(lambda: super(MortalDisk, self).remove(path))

    def make(self, path: Path) -> None:
        self._step(lambda: super(MortalDisk, self).make(path))


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Store:
    return Store(tmp_path, keep_s=KEEP_S, now=clock)


def lines(count: int) -> bytes:
    return b"".join(
        json.dumps({"custom_id": f"id-{n}", "method": "POST", "url": CHAT, "body": {"model": "m"}}).encode() + b"\n"
        for n in range(count)
    )


def upload(store: Store, content: bytes = b"x\n", key: str = "alice") -> str:
    return store.files.add(key, io.BytesIO(content), filename="in.jsonl", purpose="batch", keep_s=KEEP_S).id


def create(store: Store, count: int = 3, key: str = "alice") -> str:
    file_id = upload(store, lines(count), key)
    return store.create(
        key, input_file_id=file_id, endpoint=CHAT, window="24h", window_s=86_400, metadata={"a": "b"}
    ).id


def result(custom_id: str, status: int = 200) -> Result:
    return Result(custom_id, "0" * 32, status, b'{"n":1,\n"s":"\\n"}')


def work(store: Store, ran: list[str], clock: Clock) -> None:
    """What the runner does with every batch, one line after the other."""
    for key, batch_id in store.active():
        claim = store.claim(key, batch_id)
        if claim is None:
            continue
        try:
            plan = claim.plan(Bounds(100, 1000, CHAT))
            if claim.batch.status == "validating":
                claim.save(moved(claim.batch, "in_progress", clock(), total=len(plan.lines)))
            if claim.batch.status == "in_progress":
                for line in plan.lines:
                    if line.custom_id not in claim.ledger:
                        ran.append(line.custom_id)
                        claim.ledger.add([result(line.custom_id, 400 if line.number == 2 else 200)])
                claim.save(moved(claim.counted(), "finalizing", clock()))
            claim.finish(clock())
        finally:
            # The kernel closes what a killed process had open.
            claim.close()


def recorded(store: Store, key: str, file_id: str | None) -> list[str]:
    assert file_id
    return [json.loads(raw)["custom_id"] for raw in store.files.path(key, file_id).read_bytes().splitlines()]


@pytest.mark.parametrize("done", [True, False])
def test_killed_at_any_step_and_started_again_every_line_is_recorded_once(tmp_path: Path, done: bool) -> None:
    for last in range(1, 200):
        directory = tmp_path / str(last)
        clock = Clock()
        batch_id = create(Store(directory, keep_s=KEEP_S, now=clock), 4)
        ran: list[str] = []
        died = False
        try:
            work(Store(directory, keep_s=KEEP_S, disk=MortalDisk(last, done=done), now=clock), ran, clock)
        except Killed:
            died = True
        store = Store(directory, keep_s=KEEP_S, now=clock)
        work(store, ran, clock)
        batch = store.get("alice", batch_id)
        assert batch.status == "completed"
        assert (batch.total, batch.completed, batch.failed) == (4, 3, 1)
        assert recorded(store, "alice", batch.output_file_id) == ["id-0", "id-2", "id-3"]
        assert recorded(store, "alice", batch.error_file_id) == ["id-1"]
        assert len(ran) <= 5, "only the line whose result was not written yet is run again"
        store.claim("alice", batch_id)
        assert not store.active()
        assert len(store.files.page("alice", purpose=None, after=None, limit=9, newest_first=True).items) == 3
        if not died:
            assert last > 10
            return
    pytest.fail("it never came to its end")


@pytest.mark.parametrize("done", [True, False])
def test_killed_twice_at_any_steps_every_line_is_recorded_once(tmp_path: Path, done: bool) -> None:
    for first in range(3, 16):
        for second in range(2, 16, 2):
            directory = tmp_path / f"{first}-{second}"
            clock = Clock()
            batch_id = create(Store(directory, keep_s=KEEP_S, now=clock), 3)
            for last in (first, second, 10_000):
                try:
                    work(Store(directory, keep_s=KEEP_S, disk=MortalDisk(last, done=done), now=clock), [], clock)
                except Killed:
                    continue
            store = Store(directory, keep_s=KEEP_S, now=clock)
            batch = store.get("alice", batch_id)
            assert batch.status == "completed"
            assert recorded(store, "alice", batch.output_file_id) == ["id-0", "id-2"]
            assert recorded(store, "alice", batch.error_file_id) == ["id-1"]


@pytest.mark.parametrize("done", [True, False])
def test_killed_while_a_batch_is_made_it_is_there_and_will_run_or_it_is_not_there(tmp_path: Path, done: bool) -> None:
    for last in range(1, 50):
        directory = tmp_path / str(last)
        clock = Clock()
        made = True
        try:
            create(Store(directory, keep_s=KEEP_S, disk=MortalDisk(last, done=done), now=clock))
        except Killed:
            made = False
        store = Store(directory, keep_s=KEEP_S, now=clock)
        listed = store.page("alice", after=None, limit=9).items
        active = [batch_id for _, batch_id in store.active()]
        assert {one.id for one in listed} <= set(active)
        for one in store.files.page("alice", purpose=None, after=None, limit=9, newest_first=True).items:
            assert store.files.path("alice", one.id).stat().st_size == one.bytes
        if made:
            assert len(listed) == 1
            return
    pytest.fail("it never came to its end")


def test_a_marker_that_a_crash_left_is_removed(tmp_path: Path, clock: Clock, store: Store) -> None:
    (tmp_path / "active" / ("batch_" + "0" * 32)).write_text("alice")
    ((key, batch_id),) = store.active()
    clock.now = (tmp_path / "active" / batch_id).stat().st_mtime
    assert store.claim(key, batch_id) is None
    assert store.active(), "it may be one that is just being made"
    clock.now += 100
    assert store.claim(key, batch_id) is None
    assert not store.active()


def test_a_half_written_line_is_dropped_and_the_log_goes_on_behind_the_last_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    ledger = Ledger(path, Disk())
    ledger.add([result("a"), result("b", 400)])
    whole = path.read_bytes()
    assert whole.count(b"\n") == 2
    ledger.close()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        ledger = Ledger(path, Disk())
        ledger.add([result("a"), result("b", 400), result("c")])
        ledger.close()
        assert [json.loads(raw)["custom_id"] for raw in path.read_bytes().splitlines()] == ["a", "b", "c"]


def test_a_result_is_recorded_once_however_often_it_comes(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "results.jsonl", Disk())
    ledger.add([result("a", 400), result("a")])
    ledger.add([result("a")])
    assert (ledger.good, ledger.bad) == (set(), {"a"})
    assert len((tmp_path / "results.jsonl").read_bytes().splitlines()) == 1


def test_a_record_is_openais() -> None:
    assert json.loads(result("a").record()) == {
        "id": "batch_req_" + "0" * 32,
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "0" * 32, "body": {"n": 1, "s": "\n"}},
        "error": None,
    }
    never = Result("a", "1", None, error=("batch_expired", "Too late."))
    assert json.loads(never.record())["error"] == {"code": "batch_expired", "message": "Too late."}
    assert json.loads(Result("a", "1", 502, b"<html>\n").record())["response"]["body"] == "<html>\n"


def test_a_batch_has_one_owner_at_a_time(tmp_path: Path, clock: Clock, store: Store) -> None:
    batch_id = create(store)
    other = Store(tmp_path, keep_s=KEEP_S, now=clock)
    claim = store.claim("alice", batch_id)
    assert claim
    assert other.claim("alice", batch_id) is None
    assert store.claim("alice", batch_id) is None
    claim.close()
    second = other.claim("alice", batch_id)
    assert second
    second.close()


def test_another_process_that_dies_frees_its_batch(store: Store) -> None:
    batch_id = create(store)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        claim = store.claim("alice", batch_id)
        os.write(writer, b"1" if claim else b"0")
        signal.pause()
    assert os.read(reader, 1) == b"1"
    assert store.claim("alice", batch_id) is None
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    claim = store.claim("alice", batch_id)
    assert claim
    claim.close()


@pytest.mark.parametrize("wrong", ["", "..", "file-1", "file-" + "0" * 32, "../alice/x", "file-" + "0" * 31 + "/"])
def test_ids_that_are_none_are_not_found(store: Store, wrong: str) -> None:
    for look in (store.files.get, store.files.path, store.files.delete, store.get, store.cancel):
        with pytest.raises(ApiError) as refused:
            look("alice", wrong)  # type: ignore[operator]
        assert refused.value.status == 404


@pytest.mark.parametrize("stranger", ["bob", "..", ".", "alic"])
def test_nobody_sees_what_is_anothers(store: Store, stranger: str) -> None:
    batch_id = create(store)
    file_id = store.get("alice", batch_id).input_file_id
    for look, name in (
        (store.files.get, file_id),
        (store.files.path, file_id),
        (store.files.delete, file_id),
        (store.get, batch_id),
        (store.cancel, batch_id),
    ):
        with pytest.raises(ApiError) as refused:
            look(stranger, name)  # type: ignore[operator]
        assert refused.value.status == 404
    with pytest.raises(ApiError):
        store.create(stranger, input_file_id=file_id, endpoint=CHAT, window="24h", window_s=1, metadata=None)
    assert not store.page(stranger, after=None, limit=9).items
    assert not store.files.page(stranger, purpose=None, after=None, limit=9, newest_first=True).items
    assert store.get("alice", batch_id).status == "validating"


def test_a_batch_keeps_the_input_that_is_deleted(store: Store, clock: Clock) -> None:
    batch_id = create(store)
    store.files.delete("alice", store.get("alice", batch_id).input_file_id)
    work(store, [], clock)
    assert store.get("alice", batch_id).status == "completed"


def test_a_disk_without_links_keeps_a_copy(store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    test_a_batch_keeps_the_input_that_is_deleted(store, clock)


def test_pages_hold_every_item_once_in_order(store: Store) -> None:
    ids = [upload(store) for _ in range(7)]
    for newest_first in (True, False):
        found: list[str] = []
        after = None
        while True:
            page = store.files.page("alice", purpose="batch", after=after, limit=3, newest_first=newest_first)
            found += [one.id for one in page.items]
            after = found[-1]
            if not page.more:
                break
        assert found == sorted(ids, reverse=newest_first) == (ids[::-1] if newest_first else ids)
    assert not store.files.page("alice", purpose="other", after=None, limit=3, newest_first=True).items


def test_files_and_ended_batches_go_when_their_time_is_over(store: Store, clock: Clock, tmp_path: Path) -> None:
    ended, running = create(store), create(store)
    claim = store.claim("alice", ended)
    assert claim
    claim.save(moved(claim.batch, "failed", clock()))
    claim.close()
    store.sweep()
    assert len(store.page("alice", after=None, limit=9).items) == 2
    clock.now += KEEP_S + 10
    store.sweep()
    assert [one.id for one in store.page("alice", after=None, limit=9).items] == [running]
    assert not list((tmp_path / "files").rglob("file-*"))
    assert store.claim("alice", running), "what runs has its own copy of the input"


def test_cancel_is_seen_at_once_and_refused_when_it_is_over(store: Store, clock: Clock) -> None:
    batch_id = create(store)
    assert store.cancel("alice", batch_id).status == "cancelling"
    assert store.cancel("alice", batch_id).status == "cancelling"
    other = create(store)
    claim = store.claim("alice", other)
    assert claim
    claim.save(moved(claim.batch, "failed", clock()))
    claim.close()
    with pytest.raises(ApiError) as refused:
        store.cancel("alice", other)
    assert (refused.value.status, refused.value.code) == (409, "batch_not_cancellable")
    assert store.get("alice", other).status in FINAL


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    # What these tests kill is our process, not the machine.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
