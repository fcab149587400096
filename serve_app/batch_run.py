"""`python -m serve_app batch run`: the lines of a file against a running service, with a progress bar."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from serve_app.batches.disk import Disk
from serve_app.batches.drive import Answer, Drive, error_code, refused
from serve_app.batches.ledger import Ledger, Result
from serve_app.batches.plan import OFFLINE_PRIORITY, Bounds, Line, Plan, body_of, groups, read_plan
from serve_app.catalog import AUTO
from serve_app.errors import unavailable
from serve_app.remote import KEY_VARIABLE, RemoteError, ask

_BOUNDS = Bounds(max_lines=10_000_000, max_line_bytes=1 << 28)
_CONNECT_TIMEOUT_S = 10.0
_AWAY = "unreachable"


class BatchError(Exception):
    """A file that cannot be used. The message is for a person."""


def run_file(source: Path, target: Path, url: str, concurrency: int, console: Console) -> int:
    """Run what `target` has no result of yet; returns how many lines failed. Raises `BatchError`, `RemoteError`."""
    plan = _plan(source)
    with _results(target) as ledger:
        left = [line for line in plan.lines if line.custom_id not in ledger]
        if len(left) < len(plan.lines):
            console.print(f"{len(plan.lines) - len(left)} of {len(plan.lines)} lines have a result already.")
        if left:
            cards = ask(url, "/v1/models")["data"]
            with _progress(console) as progress:
                task = progress.add_task("", total=len(plan.lines), completed=len(plan.lines) - len(left), failed=0)

                def show() -> None:
                    progress.update(task, completed=len(ledger.good) + len(ledger.bad), failed=len(ledger.bad))

                asyncio.run(_run(source, left, ledger, cards, url, concurrency, show))
        console.print(
            f"{target}: {len(ledger.good)} answered, {len(ledger.bad)} failed", highlight=False, soft_wrap=True
        )
        return len(ledger.bad)


def _plan(source: Path) -> Plan:
    try:
        with source.open("rb") as file:
            plan = read_plan(file, _BOUNDS)
    except OSError as error:
        raise BatchError(f"{source}: {error.strerror}") from None
    if plan.problems:
        found = (
            ":".join(str(part) for part in (source, problem.line) if part) + f": {problem.message}"
            for problem in plan.problems
        )
        raise BatchError("\n".join(found))
    return plan


@contextlib.contextmanager
def _results(target: Path) -> Iterator[Ledger]:
    """The results so far, ours alone to add to."""
    try:
        lock = os.open(target, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise BatchError(f"{target}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ledger = Ledger(target, Disk())
    except BlockingIOError:
        os.close(lock)
        raise BatchError(f"{target}: another run writes to it") from None
    except ValueError:
        os.close(lock)
        raise BatchError(f"{target}: holds something else than results of a batch; give another file") from None
    try:
        yield ledger
    finally:
        ledger.close()
        os.close(lock)


def _progress(console: Console) -> Progress:
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


async def _run(
    source: Path,
    left: Sequence[Line],
    ledger: Ledger,
    cards: list[dict[str, Any]],
    url: str,
    concurrency: int,
    show: Callable[[], None],
) -> None:
    ids = {name: card["id"] for card in cards for name in (card["id"], *card.get("aliases", ()))}
    awake = {card["id"] for card in cards if card.get("state") == "awake"}

    def engine_of(model: str) -> str | None:
        return None if model in ("", AUTO) else ids.get(model, model)

    async def record(results: Sequence[Result]) -> None:
        known = [result for result in results if not _away(result)]
        await asyncio.to_thread(ledger.add, known)
        show()
        if len(known) < len(results):
            raise RemoteError(f"{url}: no answer; the same command goes on when it is back")

    headers = {"content-type": "application/json"}
    if key := os.environ.get(KEY_VARIABLE):
        headers["authorization"] = f"Bearer {key}"
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    with source.open("rb") as file:
        async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:

            async def send(line: Line) -> Answer:
                body = body_of(os.pread(file.fileno(), line.size, line.start), priority=OFFLINE_PRIORITY)
                return await _sent(session, url.rstrip("/") + line.url, body)

            for group in groups(left, engine_of, awake.__contains__):
                await Drive(send, lambda: concurrency, record).run(group.lines)


async def _sent(session: aiohttp.ClientSession, url: str, body: bytes) -> Answer:
    request_id = uuid.uuid4().hex
    try:
        async with session.post(url, data=body, headers={"x-request-id": request_id}) as response:
            retry_after = response.headers.get("retry-after", "")
            seconds = float(retry_after) if retry_after.isdigit() else None
            return Answer(response.status, await response.read(), request_id, seconds)
    except (aiohttp.ClientError, TimeoutError):
        return refused(unavailable("The service does not answer.", code=_AWAY, retry_after_s=1), request_id)


def _away(result: Result) -> bool:
    return result.status == 503 and error_code(Answer(503, result.body, "")) == _AWAY
