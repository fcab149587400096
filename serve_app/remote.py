"""What the command line asks of a running service."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection
from typing import Any

from rich.console import Console
from rich.table import Table

_TIMEOUT_S = 30.0
KEY_VARIABLE = "SWITCHYARD_KEY"


class RemoteError(Exception):
    """The service did not answer, or refused. The message is for a person."""


def ask(url: str, path: str, body: dict[str, Any] | None = None, *, also: Collection[int] = ()) -> dict[str, Any]:
    """GET, or POST where there is a body. The key, if any, is that of `SWITCHYARD_KEY`: arguments show in `ps`.

    `also`: statuses of which the answer is wanted, too. Raises `RemoteError`.
    """
    headers = {"content-type": "application/json"}
    if key := os.environ.get(KEY_VARIABLE):
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url.rstrip("/") + path, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        try:
            answer = json.load(error)
            if error.code in also:
                return dict(answer)
            message = answer["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = error.reason
        raise RemoteError(f"{error.code}: {message}") from None
    except (OSError, ValueError) as error:
        raise RemoteError(f"{url}: no answer ({error})") from None


def order(url: str, model: str, what: str) -> str:
    """Have a lazy model loaded, put to sleep, unloaded, pinned or unpinned; says how it stands."""
    answer = ask(url, f"/v1/router/models/{urllib.parse.quote(model)}/{what}", {})
    return f"{answer['id']}: {answer['order']} accepted; it is {answer['state']}"


def show_models(url: str, console: Console) -> None:
    """Every model with its state."""
    table = Table(box=None)
    for title in ("model", "tier", "state", "in flight", "wakes in", "memory", "loads", "wakes"):
        table.add_column(title)
    for card in ask(url, "/v1/models")["data"]:
        if "state" not in card:
            continue
        state = card["state"] + (f" {card['progress']:.0%}" if card["progress"] else "")
        state += f" (place {card['place']})" if card["place"] else ""
        state += " (pinned)" if card["pinned"] else ""
        memory = f"{card['memory_bytes'] / 1e9:.1f} GB" if card["memory_bytes"] else ""
        wakes_in = f"{card['expected_wake_s']:.0f} s" if card["expected_wake_s"] else ""
        numbers = [str(card[key]) for key in ("loads", "wakes")]
        table.add_row(card["id"], card["tier"], state, str(card["in_flight"]), wakes_in, memory, *numbers)
        if card["failure"]:
            table.add_row("", "", f"[red]{card['failure']}")
    console.print(table)
