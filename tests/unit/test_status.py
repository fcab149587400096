"""The table of `python -m serve_app status`, and its words where nothing runs."""

import socket

from rich.console import Console
from typer.testing import CliRunner

from serve_app.cli import app
from serve_app.status import Status, rendered

CARD = {
    "id": "hot",
    "tier": "resident",
    "state": "awake",
    "progress": 0,
    "place": 0,
    "pinned": False,
    "in_flight": 3,
    "waiting": 2,
    "kv_cache": 0.25,
    "memory_bytes": 4_200_000_000,
    "expected_wake_s": 0,
    "loads": 1,
    "wakes": 0,
    "failure": None,
}
COLD = {**CARD, "id": "cold[1]", "tier": "lazy", "state": "loading", "progress": 0.4, "place": 2, "expected_wake_s": 12}


def shown(status: Status, width: int = 160) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(rendered(status))
    return capture.get()


def test_every_model_is_a_line_with_its_state_and_numbers() -> None:
    lines = shown(Status(True, "moving", "abc", "", [CARD, COLD])).splitlines()
    assert lines[0].split() == ["ready", "configuration", "abc"]
    assert lines[2].split() == ["hot", "resident", "awake", "3", "2", "25%", "4.2", "1", "0"]
    assert lines[3].split()[:6] == ["cold[1]", "lazy", "loading", "40%", "(place", "2)"]
    assert lines[3].split()[-3] == "12"


def test_it_fits_a_terminal() -> None:
    card = {
        **CARD,
        "id": "smollm2-135m-lazy",
        "tier": "lazy",
        "state": "loading",
        "progress": 0.99,
        "expected_wake_s": 5,
    }
    lines = shown(Status(True, "moving", "abc", "", [CARD, card]), width=80).splitlines()
    assert lines[1].split() == ["model", "tier", "state", "runs", "waits", "KV", "GB", "wake", "s", "loads", "wakes"]
    assert lines[3].split() == ["smollm2-135m-lazy", "lazy", "loading", "99%", "3", "2", "25%", "4.2", "5", "1", "0"]


def test_what_is_wrong_is_said() -> None:
    text = shown(Status(False, "stuck", "abc", "user_config.router.hold_s: no", [{**CARD, "failure": "no memory"}]))
    assert "not ready" in text
    assert "loads are stuck" in text
    assert "hot: no memory" in text
    assert "user_config.router.hold_s: no" in text


def test_where_nothing_runs_it_says_so() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        result = CliRunner().invoke(app, ["status", "--url", url])
    assert result.exit_code == 1
    assert "no answer" in result.output
