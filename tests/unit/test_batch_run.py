"""`batch run` against a small service of our own: results once, gone on with, and what is said of wrong files."""

import fcntl
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from typer.testing import CliRunner

from serve_app.batches import plan
from serve_app.cli import app

CHAT = "/v1/chat/completions"
KEY = "the-key"


class Service:
    """Answers chats; refuses what `refuse` says, each so often."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.hang_up = False
        self.refuse: dict[str, list[Response]] = {}
        routes = [Route("/v1/models", self.models), Route(CHAT, self.chat, methods=["POST"])]
        self._server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_level="error"))
        self._thread = threading.Thread(target=self._server.run)

    def __enter__(self) -> "Service":
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.should_exit = True
        self._thread.join()

    async def models(self, request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"error": {"message": "no key"}}, 401)
        cards = [{"id": name, "state": state} for name, state in (("a", "stopped"), ("b", "awake"))]
        return JSONResponse({"data": [*cards, {"id": "auto"}]})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        if self.hang_up:
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()  # type: ignore[union-attr]
        self.asked.append(body["n"])
        if refusals := self.refuse.get(body["n"]):
            return refusals.pop()
        return JSONResponse({"echo": body})


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("SWITCHYARD_KEY", KEY)
    with Service() as running:
        yield running


def write(path: Path, models: str) -> None:
    lines = [
        {"custom_id": f"id-{n}", "method": "POST", "url": CHAT, "body": {"model": model, "n": f"{n}"}}
        for n, model in enumerate(models)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def run(tmp_path: Path, url: str) -> Any:
    return CliRunner().invoke(app, ["batch", "run", str(tmp_path / "in"), str(tmp_path / "out"), "--url", url])


def found(tmp_path: Path) -> Counter[str]:
    return Counter(json.loads(line)["custom_id"] for line in (tmp_path / "out").read_text().splitlines())


def test_every_line_has_one_result_and_models_are_asked_one_after_the_other(tmp_path: Path, service: Service) -> None:
    write(tmp_path / "in", "abab")
    done = run(tmp_path, service.url)
    assert done.exit_code == 0, done.output
    assert "4 answered, 0 failed" in done.output
    assert found(tmp_path) == Counter({f"id-{n}": 1 for n in range(4)})
    assert '"priority":-10' in (tmp_path / "out").read_text(), "others go before"
    assert [sorted(service.asked[:2]), sorted(service.asked[2:])] == [["1", "3"], ["0", "2"]]


def test_what_has_a_result_is_not_run_again(tmp_path: Path, service: Service) -> None:
    write(tmp_path / "in", "aaaa")
    run(tmp_path, service.url)
    lines = (tmp_path / "out").read_bytes().splitlines(keepends=True)
    (tmp_path / "out").write_bytes(b"".join(lines[:2]) + lines[2][:20])
    service.asked.clear()
    assert run(tmp_path, service.url).exit_code == 0
    assert len(service.asked) == 2
    assert found(tmp_path) == Counter({f"id-{n}": 1 for n in range(4)})
    service.asked.clear()
    assert run(tmp_path, service.url).exit_code == 0
    assert not service.asked


def test_busy_is_tried_again_and_a_refusal_is_a_failed_line(tmp_path: Path, service: Service) -> None:
    write(tmp_path / "in", "aa")
    busy = JSONResponse({"error": {"code": "overloaded"}}, 503, {"retry-after": "1"})
    service.refuse = {"0": [busy], "1": [JSONResponse({"error": {"code": "invalid_value"}}, 400)]}
    done = run(tmp_path, service.url)
    assert done.exit_code == 1
    assert "1 answered, 1 failed" in done.output
    assert Counter(service.asked) == {"0": 2, "1": 1}


def test_a_service_that_is_away_leaves_its_lines_for_later(
    tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(plan._TRIES, "unreachable", 1)
    write(tmp_path / "in", "aa")

    service.hang_up = True
    done = run(tmp_path, service.url)
    assert done.exit_code == 1
    assert "goes on when it is back" in done.output
    assert (tmp_path / "out").read_bytes() == b""
    service.hang_up = False
    assert run(tmp_path, service.url).exit_code == 0


@pytest.mark.parametrize(("content", "says"), [("", "no requests"), ("{}\n", "in:1: "), (None, "No such file")])
def test_a_wrong_input_is_named_by_file_and_line(
    tmp_path: Path, service: Service, content: str | None, says: str
) -> None:
    if content is not None:
        (tmp_path / "in").write_text(content)
    done = run(tmp_path, service.url)
    assert done.exit_code == 1
    assert says in done.output


def test_a_file_of_something_else_is_not_touched(tmp_path: Path, service: Service) -> None:
    write(tmp_path / "in", "a")
    write(tmp_path / "out", "a")
    before = (tmp_path / "out").read_bytes()
    done = run(tmp_path, service.url)
    assert done.exit_code == 1
    assert "something else" in done.output
    assert (tmp_path / "out").read_bytes() == before


def test_a_text_without_an_end_of_line_is_not_taken_for_a_torn_result(tmp_path: Path, service: Service) -> None:
    write(tmp_path / "in", "a")
    (tmp_path / "out").write_text("my only copy")
    assert run(tmp_path, service.url).exit_code == 1
    assert (tmp_path / "out").read_text() == "my only copy"


def test_two_runs_do_not_write_to_one_file(tmp_path: Path, service: Service) -> None:
    write(tmp_path / "in", "a")
    with (tmp_path / "out").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = run(tmp_path, service.url)
    assert done.exit_code == 1
    assert "another run" in done.output


def test_a_wrong_key_fails_before_any_line(tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWITCHYARD_KEY", "wrong")
    write(tmp_path / "in", "a")
    assert run(tmp_path, service.url).exit_code == 1
    assert not service.asked
