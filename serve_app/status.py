"""`python -m serve_app status`: a running service at a glance, from its public endpoints."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from serve_app.remote import RemoteError, ask


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """What `/ready` and `/v1/models` said. `models`: the cards, without that of `auto`."""

    ready: bool
    load_path: str
    policy: str
    refused: str
    models: list[dict[str, Any]]

    def as_json(self) -> str:
        """For another program."""
        return json.dumps(dataclasses.asdict(self), indent=2)


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
    )


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
    notes = [Text(f"{card['id']}: {card['failure']}", "red") for card in status.models if card["failure"]]
    if status.refused:
        notes.append(Text(f"The newest configuration is refused, the one before applies:\n{status.refused}", "red"))
    return Group(head, table, *notes)


def _state(card: dict[str, Any]) -> str:
    state = str(card["state"])
    state += f" {card['progress']:.0%}" if card["progress"] else ""
    state += f" (place {card['place']})" if card["place"] else ""
    return state + (" (pinned)" if card["pinned"] else "")
