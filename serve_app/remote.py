"""What the command line asks of a running service."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

_TIMEOUT_S = 30.0
# The feed says something every 5 s.
_SILENCE_S = 15.0
KEY_VARIABLE = "SWITCHYARD_KEY"


class RemoteError(Exception):
    """The service did not answer, or refused. The message is for a person; `status`: of a refusal."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def ask(url: str, path: str, body: dict[str, Any] | None = None, *, also: Collection[int] = ()) -> dict[str, Any]:
    """GET, or POST where there is a body. `also`: statuses of which the answer is wanted, too. Raises `RemoteError`."""
    try:
        with urllib.request.urlopen(_request(url, path, body), timeout=_TIMEOUT_S) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        if error.code in also:
            with contextlib.suppress(ValueError):
                return dict(json.load(error))
        raise _refused(error) from None
    except (OSError, ValueError) as error:
        raise RemoteError(f"{url}: no answer ({error})") from None


def events(url: str, *, once: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """The feed of a service, event by event: name and data. `once`: how things are now, and no more.

    Raises `RemoteError`. Where the connection ends it just ends.
    """
    path = f"/v1/router/events{'?once=true' if once else ''}"
    try:
        with urllib.request.urlopen(_request(url, path), timeout=_SILENCE_S) as stream:
            name = ""
            for raw in stream:
                field, _, value = raw.decode().rstrip("\r\n").partition(": ")
                if field == "event":
                    name = value
                elif field == "data":
                    yield name, json.loads(value)
    except urllib.error.HTTPError as error:
        raise _refused(error) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise RemoteError(f"{url}: no answer ({error})") from None


def _request(url: str, path: str, body: dict[str, Any] | None = None) -> urllib.request.Request:
    """With the key of `SWITCHYARD_KEY`, if there is one: arguments show in `ps`."""
    headers = {"content-type": "application/json"}
    if key := os.environ.get(KEY_VARIABLE):
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.Request(url.rstrip("/") + path, data=data, headers=headers)


def _refused(error: urllib.error.HTTPError) -> RemoteError:
    try:
        message = json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = error.reason
    return RemoteError(f"{error.code}: {message}", error.code)


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
