"""Lines on a scripted service: the lane, interactive requests first, what is tried again, and ends of every kind."""

import asyncio
import contextlib
import io
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from serve_app.batches import drive, runner
from serve_app.batches.drive import Answer, Drive
from serve_app.batches.ledger import Result
from serve_app.batches.plan import Line, Load
from serve_app.batches.runner import Runner
from serve_app.batches.state import Batch
from serve_app.batches.store import Store
from serve_app.service_schema import Batches

CHAT = "/v1/chat/completions"
OK = orjson.dumps({"choices": []})
PATIENCE_S = 10.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((drive, "LOOK_S"), (runner, "_LOOK_S"), (runner, "_STOP_LOOK_S"), (runner, "_SAVE_EVERY_S")):
        monkeypatch.setattr(module, name, 0.005)


def line(number: int, model: str = "m") -> Line:
    return Line(number, f"id-{number}", CHAT, model, 0, 0)


class Lines:
    """Answers what a script says; knows how many ran at once."""

    def __init__(self, script: Callable[[Line, int], Answer | None] = lambda line, tries: None) -> None:
        self.script = script
        self.free = asyncio.Event()
        self.free.set()
        self.running = 0
        self.most = 0
        self.begun: Counter[str] = Counter()
        self.dropped = 0
        self.recorded: list[Result] = []

    async def ask(self, line: Line) -> Answer:
        self.begun[line.custom_id] += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0.001)
            await self.free.wait()
            return self.script(line, self.begun[line.custom_id]) or Answer(200, OK, "r")
        except asyncio.CancelledError:
            self.dropped += 1
            raise
        finally:
            self.running -= 1

    async def record(self, results: Sequence[Result]) -> None:
        self.recorded += results


async def until(look: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not look():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def test_as_many_lines_run_at_once_as_there_is_room_for() -> None:
    lines = Lines()
    assert await Drive(lines.ask, lambda: 3, lines.record).run([line(n) for n in range(20)])
    assert lines.most == 3
    assert sorted(one.custom_id for one in lines.recorded) == sorted(f"id-{n}" for n in range(20))
    assert set(lines.begun.values()) == {1}


async def test_lines_that_run_give_way_and_begin_anew_when_there_is_room_again() -> None:
    lines, room = Lines(), 4
    lines.free.clear()
    running = asyncio.create_task(Drive(lines.ask, lambda: room, lines.record).run([line(n) for n in range(4)]))
    await until(lambda: lines.running == 4)
    room = 0
    await until(lambda: lines.running == 0)
    assert lines.dropped == 4
    assert not lines.recorded
    room = 4
    lines.free.set()
    assert await running
    assert Counter(one.custom_id for one in lines.recorded) == Counter(f"id-{n}" for n in range(4))


async def test_less_room_stops_no_line_that_runs() -> None:
    lines, room = Lines(), 4
    lines.free.clear()
    running = asyncio.create_task(Drive(lines.ask, lambda: room, lines.record).run([line(n) for n in range(8)]))
    await until(lambda: lines.running == 4)
    room = 1
    await asyncio.sleep(0.05)
    assert (lines.running, lines.dropped) == (4, 0)
    lines.most = 0
    lines.free.set()
    assert await running
    assert lines.most == 1


async def test_a_line_that_gave_way_often_is_let_run() -> None:
    lines, room = Lines(), 1
    lines.free.clear()
    running = asyncio.create_task(Drive(lines.ask, lambda: room, lines.record).run([line(0)]))
    for _ in range(3):
        await until(lambda: lines.running == 1)
        room = 0
        await until(lambda: lines.running == 0)
        room = 1
    await until(lambda: lines.running == 1)
    room = 0
    await asyncio.sleep(0.05)
    assert lines.running == 1
    lines.free.set()
    assert await running


def busy(code: str, status: int = 503, retry_after_s: float | None = None) -> Answer:
    return Answer(status, orjson.dumps({"error": {"code": code}}), "r", retry_after_s)


class Skipping:
    """A clock that jumps over waits."""

    def __init__(self) -> None:
        self.skipped = 0.0

    def __call__(self) -> float:
        self.skipped += 0.1
        return self.skipped


async def test_busy_is_tried_again_and_recorded_once_it_is_answered() -> None:
    lines = Lines(lambda line, tries: busy("overloaded", retry_after_s=1) if tries < 4 else None)
    assert await Drive(lines.ask, lambda: 2, lines.record, clock=Skipping()).run([line(n) for n in range(3)])
    assert set(lines.begun.values()) == {4}
    assert [one.status for one in lines.recorded] == [200] * 3


async def test_a_line_that_never_works_is_recorded_as_it_was_answered_last() -> None:
    lines = Lines(lambda line, tries: busy("engine_died") if line.number == 1 else None)
    assert await Drive(lines.ask, lambda: 2, lines.record, clock=Skipping()).run([line(n) for n in range(3)])
    assert lines.begun["id-1"] == 2
    assert {one.custom_id: one.status for one in lines.recorded} == {"id-0": 200, "id-1": 503, "id-2": 200}


async def test_while_the_model_is_full_nothing_else_is_sent_to_it() -> None:
    lines = Lines(lambda line, tries: busy("overloaded", retry_after_s=60) if line.number == 0 else None)
    running = asyncio.create_task(Drive(lines.ask, lambda: 1, lines.record).run([line(n) for n in range(9)]))
    await until(lambda: lines.begun)
    await asyncio.sleep(0.05)
    assert set(lines.begun) == {"id-0"}
    running.cancel()


async def test_stopped_it_keeps_what_is_answered_and_drops_the_rest() -> None:
    stop = False
    lines = Lines()
    driving = Drive(lines.ask, lambda: 1, lines.record, stop=lambda: stop)
    running = asyncio.create_task(driving.run([line(n) for n in range(50)]))
    await until(lambda: len(lines.recorded) >= 2)
    lines.free.clear()
    stop = True
    assert not await running
    assert lines.running == 0
    assert len(lines.recorded) < 50


# The runner


class Service:
    """Answers after the script's wish; `interactive` is what else it has to do."""

    def __init__(self) -> None:
        self.interactive = 0
        self.free = asyncio.Event()
        self.free.set()
        self.asked: list[tuple[str, str, Any]] = []
        self.status = 200
        self.running = 0

    def engine_of(self, model: str) -> str | None:
        return None if model in ("", "auto") else model

    def awake(self, engine: str) -> bool:
        return False

    def load(self, engine: str | None) -> Load:
        return Load(self.interactive, 8)

    async def ask(self, key: str, url: str, body: bytes, request_id: str) -> Answer:
        self.asked.append((key, url, orjson.loads(body)))
        self.running += 1
        try:
            await asyncio.sleep(0.001)
            await self.free.wait()
            if self.status < 0:
                raise RuntimeError("a fault of ours")
            return Answer(self.status, OK, request_id)
        finally:
            self.running -= 1


class Bench:
    """A store, a service, and runners that come and go."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.service = Service()
        self.settings = Batches(directory=str(directory), **settings)
        self.now = time.time
        self.store = Store(directory, keep_s=1e6, now=lambda: self.now())
        self.directory = directory

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        store = Store(self.directory, keep_s=1e6, now=lambda: self.now())
        task = asyncio.create_task(Runner(store, self.service, self.settings, 10_000, now=lambda: self.now()).run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()

    def create(self, models: Sequence[str], *, raw: bytes | None = None) -> str:
        lines = b"".join(
            json.dumps({"custom_id": f"id-{n}", "method": "POST", "url": CHAT, "body": {"model": model}}).encode()
            + b"\n"
            for n, model in enumerate(models)
        )
        content = lines if raw is None else raw
        file = self.store.files.add("k", io.BytesIO(content), filename="f", purpose="batch", keep_s=1e6)
        made = self.store.create(
            "k", input_file_id=file.id, endpoint=CHAT, window="24h", window_s=86_400, metadata=None
        )
        return made.id

    def batch(self, batch_id: str) -> Batch:
        return self.store.get("k", batch_id)

    async def reach(self, batch_id: str, status: str) -> Batch:
        await until(lambda: self.batch(batch_id).status == status)
        return self.batch(batch_id)

    def ids(self, file_id: str | None) -> list[str]:
        if file_id is None:
            return []
        return [json.loads(raw)["custom_id"] for raw in self.store.files.path("k", file_id).read_bytes().splitlines()]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_a_batch_runs_group_by_group_and_ends(bench: Bench) -> None:
    batch_id = bench.create(["auto", "a", "b", "a", "b", "a"])
    async with bench.running():
        batch = await bench.reach(batch_id, "completed")
    assert (batch.total, batch.completed, batch.failed) == (6, 6, 0)
    assert sorted(bench.ids(batch.output_file_id)) == [f"id-{n}" for n in range(6)]
    assert batch.error_file_id is None
    assert [body["model"] for _, _, body in bench.service.asked] == ["a"] * 3 + ["b"] * 2 + ["auto"]
    assert set(batch.times) == {"in_progress", "finalizing", "completed"}


async def test_a_wrong_file_fails_and_says_where(bench: Bench) -> None:
    batch_id = bench.create([], raw=b"{}\n")
    async with bench.running():
        batch = await bench.reach(batch_id, "failed")
    assert [(found.code, found.line) for found in batch.problems] == [("invalid_custom_id", 1)]
    assert not bench.service.asked


async def test_a_batch_is_checked_while_another_one_runs(bench: Bench) -> None:
    bench.service.free.clear()
    first = bench.create(["a"])
    async with bench.running():
        await until(lambda: bench.service.running)
        await bench.reach(bench.create([], raw=b"{}\n"), "failed")
        waiting = bench.create(["b"])
        await bench.reach(waiting, "in_progress")
        assert len(bench.service.asked) == 1
        bench.service.free.set()
        await bench.reach(first, "completed")
        await bench.reach(waiting, "completed")


async def test_errors_go_to_a_file_of_their_own(bench: Bench) -> None:
    bench.service.status = 400
    batch_id = bench.create(["a", "a"])
    async with bench.running():
        batch = await bench.reach(batch_id, "completed")
    assert (batch.completed, batch.failed, batch.output_file_id) == (0, 2, None)
    assert sorted(bench.ids(batch.error_file_id)) == ["id-0", "id-1"]


async def test_nothing_runs_above_the_mark_and_what_runs_stops_at_once(bench: Bench) -> None:
    bench.service.interactive = 4
    batch_id = bench.create(["a"] * 6)
    async with bench.running():
        await bench.reach(batch_id, "in_progress")
        await asyncio.sleep(0.05)
        assert not bench.service.asked
        bench.service.free.clear()
        bench.service.interactive = 0
        await until(lambda: bench.service.running == 4)
        bench.service.interactive = 8
        await until(lambda: bench.service.running == 0)
        bench.service.interactive = 0
        bench.service.free.set()
        batch = await bench.reach(batch_id, "completed")
    assert sorted(bench.ids(batch.output_file_id)) == [f"id-{n}" for n in range(6)]


async def test_stopped_in_the_middle_and_started_again_every_line_is_there_once(bench: Bench) -> None:
    batch_id = bench.create(["a"] * 40)
    for _ in range(4):
        async with bench.running():
            before = len(bench.service.asked)
            await until(lambda before=before: len(bench.service.asked) > before + 5)  # type: ignore[misc]
    async with bench.running():
        batch = await bench.reach(batch_id, "completed")
    assert sorted(bench.ids(batch.output_file_id)) == sorted(f"id-{n}" for n in range(40))
    assert len(bench.service.asked) < 40 + 5 * 8


async def test_two_routers_run_each_line_once(bench: Bench) -> None:
    ids = [bench.create(["a"] * 15) for _ in range(3)]
    async with bench.running(), bench.running():
        for batch_id in ids:
            await bench.reach(batch_id, "completed")
    assert len(bench.service.asked) == 45


async def test_one_router_runs_lines_and_the_next_one_goes_on_when_it_ends(bench: Bench) -> None:
    bench.service.free.clear()
    ids = [bench.create(["a"] * 2), bench.create(["b"] * 2)]
    async with bench.running():
        await until(lambda: bench.service.running == 2)
        second = bench.running()
        await second.__aenter__()
        await asyncio.sleep(0.05)
        assert bench.service.running == 2
    await until(lambda: bench.service.running == 2)
    bench.service.free.set()
    for batch_id in ids:
        await bench.reach(batch_id, "completed")
    await second.__aexit__(None, None, None)


async def test_cancel_keeps_what_was_answered(bench: Bench) -> None:
    batch_id = bench.create(["a"] * 40)
    async with bench.running():
        await until(lambda: bench.batch(batch_id).completed >= 4)
        bench.service.free.clear()
        assert bench.store.cancel("k", batch_id).status == "cancelling"
        batch = await bench.reach(batch_id, "cancelled")
    assert bench.service.running == 0
    assert 4 <= batch.completed < 40
    assert len(bench.ids(batch.output_file_id)) == batch.completed
    assert batch.failed == 0


async def test_a_batch_that_waits_is_cancelled_too(bench: Bench) -> None:
    bench.service.free.clear()
    bench.create(["a"])
    async with bench.running():
        await until(lambda: bench.service.running)
        waiting = bench.create(["b"])
        bench.store.cancel("k", waiting)
        batch = await bench.reach(waiting, "cancelled")
    assert (batch.output_file_id, batch.error_file_id) == (None, None)


async def test_a_batch_whose_time_is_over_keeps_what_was_answered_and_names_the_rest(bench: Bench) -> None:
    batch_id = bench.create(["a"] * 40)
    async with bench.running():
        await until(lambda: bench.batch(batch_id).completed >= 4)
        bench.service.free.clear()
        bench.now = lambda: time.time() + 90_000
        batch = await bench.reach(batch_id, "expired")
    assert batch.completed + batch.failed == 40
    assert batch.completed >= 4
    assert sorted(bench.ids(batch.output_file_id) + bench.ids(batch.error_file_id)) == sorted(
        f"id-{n}" for n in range(40)
    )
    assert batch.error_file_id
    last = bench.store.files.path("k", batch.error_file_id).read_bytes().splitlines()[-1]
    assert json.loads(last)["error"]["code"] == "batch_expired"
    assert json.loads(last)["response"] is None


async def test_a_fault_with_a_line_is_its_result_and_the_others_run(bench: Bench) -> None:
    nested = b'{"custom_id":"deep","method":"POST","url":"/v1/chat/completions","body":{"x":' + b"[" * 300 + b"]" * 300
    batch_id = bench.create(
        [], raw=nested + b"}}\n" + b'{"custom_id":"b","method":"POST","url":"%s","body":{}}' % CHAT.encode()
    )
    async with bench.running():
        batch = await bench.reach(batch_id, "completed")
    assert (bench.ids(batch.output_file_id), bench.ids(batch.error_file_id)) == (["b"], ["deep"])


async def test_a_fault_of_ours_is_tried_again_and_then_recorded(bench: Bench) -> None:
    bench.service.status = -1
    batch_id = bench.create(["a"])
    async with bench.running():
        batch = await bench.reach(batch_id, "completed")
    assert len(bench.service.asked) == 2
    assert bench.ids(batch.error_file_id) == ["id-0"]


async def test_a_disk_that_fails_puts_a_batch_aside_and_the_next_one_runs(bench: Bench) -> None:
    broken, good = bench.create(["a"]), bench.create(["b"])
    (bench.directory / "batches" / "key-k" / broken / "input.jsonl").unlink()
    async with bench.running():
        await bench.reach(good, "completed")
    assert bench.batch(broken).status == "validating"
