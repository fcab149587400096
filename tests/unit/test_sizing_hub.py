"""`size` of a model that only the hub has: a hub of our own on the loopback address."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from serve_app.known_models import known_config

TOKEN = "hf_secret"
FILES = {
    "/org/open/resolve/main/config.json": json.dumps(known_config("Qwen/Qwen3-4B")),
    "/org/gated/resolve/main/config.json": json.dumps(known_config("Qwen/Qwen3-8B")),
    "/org/odd/resolve/main/config.json": "<html>",
}


class Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        allowed = "gated" not in self.path or self.headers.get("Authorization") == f"Bearer {TOKEN}"
        body = FILES.get(self.path)
        self.send_response(500 if "broken" in self.path else 401 if not allowed else 200 if body else 404)
        self.end_headers()
        self.wfile.write((body or "").encode() if allowed else b"")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def size(hub: str, home: Path, model: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # The hub's address is read when its client is imported, so in a process of its own.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    return subprocess.run(
        [sys.executable, "-m", "serve_app", "size", "--gpu", "80GB", "--model", model, "--json"],
        env={**kept, "HF_ENDPOINT": hub, "HF_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_config_is_read_from_the_hub_with_the_token_where_it_takes_one(hub: str, tmp_path: Path) -> None:
    assert json.loads(size(hub, tmp_path, "org/open").stdout)["kv_bytes_per_token"] == 147_456
    assert json.loads(size(hub, tmp_path, "org/gated", HF_TOKEN=TOKEN).stdout)["parameters"] > 8e9


@pytest.mark.parametrize(
    ("model", "environment", "said"),
    [
        ("org/none", {}, "org/none: no such model on the hub, or one that HF_TOKEN may not read"),
        ("org/gated", {"HF_TOKEN": "hf_wrong"}, "HF_TOKEN may not read"),
        ("org/broken", {}, "the hub answers 500"),
        ("org/odd", {}, "org/odd/config.json: not valid JSON"),
        ("org/open", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ("org/open", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the hub cannot be reached"),
    ],
)
def test_what_the_hub_does_not_give_is_said_in_a_line(
    hub: str, tmp_path: Path, model: str, environment: dict[str, str], said: str
) -> None:
    done = size(hub, tmp_path, model, **environment)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert "hf_wrong" not in done.stderr
