"""`python -m serve_app status`: a running service at a glance, from its public endpoints."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from serve_app.remote import RemoteError, ask, events
from serve_app.watch import placed
from serve_app.watched import Watched


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """What `/ready`, `/v1/models` and the feed said. `models`: the cards, without that of `auto`.

    `watched`: None where the service has no feed.
    """

    ready: bool
    load_path: str
    policy: str
    refused: str
    models: list[dict[str, Any]]
    watched: Watched | None = None

    def as_json(self) -> str:
        """For another program."""
        said = dataclasses.asdict(dataclasses.replace(self, watched=None))
        del said["watched"]
        if self.watched:
            said |= dataclasses.asdict(self.watched.rates())
            said |= {name: self.watched.models[name] for name in ("pool", "nodes")}
            said["replicas"] = {model["id"]: model["replicas"] for model in self.watched.models["models"]}
        return json.dumps(said, indent=2)


def status_of(url: str) -> Status:
    """Ask a running service. Raises `RemoteError`."""
    models = [card for card in ask(url, "/v1/models")["data"] if "state" in card]
    # A service that is not ready says so with 503, and how it is all the same.
    about = ask(url, "/ready", also=(503,))
    if "ready" not in about:
        raise RemoteError(f"{url}: something else than Switchyard answers")
    config = about.get("config") or {}
    return Status(
        ready=bool(about["ready"]),
        load_path=about.get("load_path", ""),
        policy=config.get("policy", ""),
        refused=config.get("refused") or "",
        models=models,
        watched=_watched(url),
    )


def _watched(url: str) -> Watched | None:
    watched = Watched()
    try:
        for name, data in events(url, once=True):
            watched.take(name, data)
    except RemoteError as error:
        if error.status == 404:
            return None  # it is switched off, or older than the feed
        raise
    return watched


def rendered(status: Status) -> RenderableType:
    """As a table."""
    head = Text("ready" if status.ready else "not ready", "green" if status.ready else "red")
    if status.policy:
        head.append(f"  configuration {status.policy}", "default")
    if status.load_path not in ("", "moving"):
        head.append(f"  loads are {status.load_path}", "red")
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("model", "tier", "state"):
        table.add_column(title, no_wrap=True)
    for title in ("runs", "waits", "KV", "GB", "wake s", "loads", "wakes"):
        table.add_column(title, justify="right", no_wrap=True)
    for card in status.models:
        table.add_row(
            *map(Text, (card["id"], card["tier"], _state(card), str(card["in_flight"]), str(card["waiting"]))),
            f"{card['kv_cache']:.0%}" if card["kv_cache"] else "",
            f"{card['memory_bytes'] / 1e9:.1f}" if card["memory_bytes"] else "",
            f"{card['expected_wake_s']:.0f}" if card["expected_wake_s"] else "",
            str(card["loads"]),
            str(card["wakes"]),
        )
    lines = [Text(line) for line in _lines(status.watched)] if status.watched else []
    notes = [Text(f"{card['id']}: {card['failure']}", "red") for card in status.models if card["failure"]]
    if status.refused:
        notes.append(Text(f"The newest configuration is refused, the one before applies:\n{status.refused}", "red"))
    return Group(head, table, *lines, *notes)


def _lines(watched: Watched) -> Iterator[str]:
    yield from placed(watched.models)
    rates = watched.rates()
    said = [f"{rates.requests_per_s:.1f} requests/s", f"{rates.tokens_per_s:.0f} tokens/s"]
    if times := watched.newest("ttft_ms"):
        said.append(f"TTFT p50 {times['p50']:.0f} ms")
    said.append(f"in 15 minutes {watched.count('requests')} requests, {watched.count('failed')} failed")
    refused = watched.total("refused")
    yield "traffic: " + ", ".join(said) + (f", {refused.total()} refused" if refused else "")


def _state(card: dict[str, Any]) -> str:
    state = str(card["state"])
    state += f" {card['progress']:.0%}" if card["progress"] else ""
    state += f" (place {card['place']})" if card["place"] else ""
    return state + (" (pinned)" if card["pinned"] else "")
