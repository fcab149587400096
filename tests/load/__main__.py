"""Runs the Locust profile against a fresh local service, or a running one, and prints what clients saw.

python -m tests.load --users 60 --seconds 60
python -m tests.load --url http://127.0.0.1:8000 --key KEY --key ANOTHER
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import ipaddress
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

PROFILE = Path(__file__).with_name("locustfile.py")
KINDS = ("chat", "long prompt", "tools", "stream that is left", "cold model")
# For answers that are under way when the time is over.
_FINISH_S = 20
_KEYS = ("team-a", "team-b", "limited")


def main() -> int:
    """The command; 1 if a request failed, or none of a kind was answered."""
    parser = argparse.ArgumentParser(prog="python -m tests.load", description=__doc__)
    parser.add_argument("--url", help="a running service instead of a fresh one on scripted engines")
    parser.add_argument("--key", action="append", default=[], help="an API key of it; may be given more than once")
    parser.add_argument("--users", type=int, default=40, help="clients at once (40)")
    parser.add_argument("--seconds", type=int, default=30, help="how long they ask (30)")
    parser.add_argument("--not-loopback", action="store_true", help="allow a URL on another machine")
    args = parser.parse_args()
    if args.url and not args.not_loopback and not on_loopback(args.url):
        parser.error(f"{args.url} is not on this machine; --not-loopback says that it is meant")
    with contextlib.nullcontext((args.url, args.key)) if args.url else fresh() as (url, keys):
        result = run(url, keys, args.users, args.seconds)
    return show(result, args.seconds)


def on_loopback(url: str) -> bool:
    """Whether a URL leads to this machine."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextlib.contextmanager
def fresh() -> Iterator[tuple[str, list[str]]]:
    """A service on scripted engines, with a key that reaches its rate."""
    from tests.e2e.service import running

    models = [
        {
            "id": "hot",
            "tier": "resident",
            "context": 16384,
            "replicas": 2,
            "max_ongoing_requests": 16,
            "abilities": ["chat", "completions", "tools", "json"],
            "queue": {"size": 16, "wait_s": 2},
            "fake": {"ttft_s": 0.1, "tpot_s": 0.02, "tokens": 40, "context": 16384},
        },
        *(
            {
                "id": name,
                "tier": "lazy",
                "context": 4096,
                "idle_unload_s": 10,
                "fake": {"load_s": 2, "tpot_s": 0.01, "tokens": 40},
            }
            for name in ("cold-a", "cold-b")
        ),
    ]
    keys = [{"id": key, "sha256": hashlib.sha256(key.encode()).hexdigest()} for key in _KEYS]
    keys[-1] |= {"requests_per_minute": 60}
    # Room for one of the two lazy models.
    with running(models, security={"keys": keys}, pool={"memory_gb": 1.5, "min_residency_s": 2, "ageing_s": 5}) as one:
        yield one.base_url, list(_KEYS)


def run(url: str, keys: list[str], users: int, seconds: int) -> dict[str, Any]:
    """What Locust counted: `rows` by name and method, and `failures`."""
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "result.json"
        command = [sys.executable, "-m", "locust", "-f", str(PROFILE), "--headless", "--host", url, "--only-summary"]
        command += [
            "--users",
            str(users),
            "--spawn-rate",
            str(users),
            "--run-time",
            f"{seconds}s",
            "--stop-timeout",
            "20",
        ]
        environment = {**os.environ, "LOAD_KEYS": ",".join(keys), "LOAD_RESULT": str(target)}
        # Of its own process: Locust changes how sockets work in all of it. 1: there were failures.
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if not target.exists():
            raise SystemExit(f"Locust did not run:\n{done.stderr[-2000:]}")
        result: dict[str, Any] = json.loads(target.read_text())
        return result


def show(result: dict[str, Any], seconds: int) -> int:
    """Print the table; see `main` for what comes back."""
    found = {(row["name"], row["method"]): row for row in result["rows"]}

    def count(name: str, method: str) -> int:
        return int(found[name, method]["count"]) if (name, method) in found else 0

    def times(name: str, method: str) -> str:
        row = found.get((name, method))
        return " / ".join(f"{row[share]:.0f}" for share in ("p50", "p95", "p99")) if row else "—"

    table = Table(box=None, title=f"{seconds} s; times in ms: p50 / p95 / p99")
    table.add_column("")
    for title in ("requests", "answered", "left", "429", "503", "failed", "whole answer", "first token"):
        table.add_column(title, justify="right", no_wrap=True)
    for name in KINDS:
        counts = [count(name, method) for method in ("whole", "left", "429", "503", "failed")]
        table.add_row(name, str(sum(counts)), *map(str, counts), times(name, "whole"), times(name, "first"))
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    for failure in result["failures"]:
        console.print(f"[red]{failure['name']}: {failure['kind']} × {failure['count']}", highlight=False)
    silent = [name for name in KINDS if not count(name, "whole") + count(name, "left")]
    if silent:
        console.print(f"[red]nothing was answered: {', '.join(silent)}")
    return 1 if result["failures"] or silent else 0


if __name__ == "__main__":
    sys.exit(main())
