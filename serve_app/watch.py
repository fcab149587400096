"""`python -m serve_app status --watch`: models and traffic of a running service in the terminal, from its feed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from serve_app.remote import RemoteError, events
from serve_app.watched import Watched

_AGAIN_S = 1.0
# After these nothing will change by itself.
_FINAL = frozenset({400, 401, 403, 404})
_BARS = " ▁▂▃▄▅▆▇█"
_BAR_CHARS = 45
_SHOWN_REQUESTS = 5


def watch(url: str, console: Console, pause: Callable[[float], None] = time.sleep) -> None:
    """Show it until Ctrl-C: redrawn in place on a terminal, else as lines. Raises `RemoteError` if it never answers."""
    watched = Watched()
    if console.is_terminal:
        with Live(Text("…"), console=console, auto_refresh=False) as live:
            for problem in _follow(url, watched, pause):
                live.update(screen(watched, problem), refresh=True)
    else:
        lines = Lines(watched)
        for problem in _follow(url, watched, pause):
            for line in lines.new(problem):
                console.print(Text(line), soft_wrap=True)


def _follow(url: str, watched: Watched, pause: Callable[[float], None]) -> Iterator[str]:
    """Keep `watched` true; yields after every change what is wrong with the connection, if anything is."""
    while True:
        problem = f"{url}: the connection ended"
        try:
            for name, data in events(url):
                if name == "bye":
                    problem = ""
                    break
                watched.take(name, data)
                if watched.points:  # the first three events come together
                    yield ""
        except RemoteError as error:
            if not watched.points or error.status in _FINAL:
                raise
            problem = str(error)
        if problem:
            yield problem
        pause(_AGAIN_S)


def screen(watched: Watched, problem: str) -> RenderableType:
    """Everything at once. Pure."""
    hello, said = watched.hello, watched.models
    head = Text(f"switchyard {hello['version']}  configuration {hello['policy']}")
    if hello["router"]:
        head.append(f"  router {hello['router']}")
    parts: list[RenderableType] = [head]
    if problem:
        parts.append(Text(f"{problem}; trying again. This is how it was.", "red"))
    parts += [
        Text(),
        _models(said["models"], watched.since_models_s),
        *map(Text, placed(said)),
        Text(),
        _traffic(watched),
    ]
    parts += [Text(f"{model['id']}: {model['error']}", "red") for model in said["models"] if model["error"]]
    if watched.requests:
        parts += [Text(), _requests(watched.requests[-_SHOWN_REQUESTS:])]
    return Group(*parts)


def _table(left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for title in left:
        table.add_column(title, no_wrap=True)
    for title in right:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _models(models: list[dict[str, Any]], older_s: float) -> Table:
    table = _table(("model", "tier", "state"), ("runs", "waits", "GB", "host", "wake s", "used"))
    for model in models:
        table.add_row(
            *map(Text, (model["id"], model["tier"], state_of(model))),
            str(model["running"]),
            str(model["waiting"] + model["queued"]),
            gigabytes(model["gpu_bytes"]),
            gigabytes(model["host_bytes"]),
            f"{model['wake_s']:.0f}" if model["wake_s"] else "",
            "" if model["last_used_s"] is None else ago(model["last_used_s"] + (0 if model["running"] else older_s)),
        )
    return table


def _traffic(watched: Watched) -> RenderableType:
    table = _table(("15 minutes",), ("now",))
    table.add_column("", no_wrap=True)
    rates, step_s = watched.rates(), watched.step_s
    for title, now, values in (
        ("requests/s", f"{rates.requests_per_s:.1f}", [point["requests"] / step_s for point in watched.over]),
        ("tokens/s", f"{rates.tokens_per_s:.0f}", [point["tokens"] / step_s for point in watched.over]),
        ("TTFT p50 ms", _median(watched.newest("ttft_ms")), [_p50(point["ttft_ms"]) for point in watched.over]),
        ("TPOT p50 ms", _median(watched.newest("tpot_ms")), [_p50(point["tpot_ms"]) for point in watched.over]),
    ):
        table.add_row(title, now, Text(bars(values, _BAR_CHARS)))
    counts = [f"{watched.count('requests')} requests", f"{watched.count('failed')} failed"]
    counts += [f"{count} {code}" for code, count in watched.total("refused").most_common()]
    counts.append(f"{watched.count('thinking')} thought")
    sources = ", ".join(f"{count} {source}" for source, count in watched.total("sources").most_common())
    return Group(table, Text(", ".join(counts) + (f"; model by: {sources}" if sources else "")))


def _requests(records: list[dict[str, Any]]) -> Table:
    table = _table(("time", "model", "why"), ("status", "TTFT ms", "ms", "tokens"))
    for record in reversed(records):
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(record["at"])),
            Text(record["model"] or ""),
            Text(record["error"] or record.get("rule") or record.get("model_source") or ""),
            str(record["status"]),
            "" if record["ttft_ms"] is None else f"{record['ttft_ms']:.0f}",
            f"{record['total_ms']:.0f}",
            str(record["completion_tokens"]),
        )
    return table


class Lines:
    """The same for a file or a pipe: a line when a model's state changes, and one for each step that is over."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._states: dict[str, str] = {}
        self._told = 0
        self._problem = ""

    def new(self, problem: str) -> Iterator[str]:
        """What is new since the last call."""
        now = time.strftime("%H:%M:%S")
        if problem:
            if problem != self._problem:
                yield f"{now} {problem}; trying again"
        elif self._problem:
            yield f"{now} connected again"
        self._problem = problem
        states = {model["id"]: model["state"] for model in self._watched.models["models"]}
        for model in self._watched.models["models"]:
            if self._states.get(model["id"]) != model["state"]:
                yield f"{now} {model['id']}: {model['state']}" + (f": {model['error']}" if model["error"] else "")
        for gone in self._states.keys() - states.keys():
            yield f"{now} {gone}: no longer configured"
        self._states = states
        over = self._watched.over
        # Not all 15 minutes at the start.
        for point in over if self._told else over[-1:]:
            if point["t"] > self._told:
                yield self._step(point)
                self._told = point["t"]

    def _step(self, point: dict[str, Any]) -> str:
        step_s = self._watched.step_s
        at = time.strftime("%H:%M:%S", time.localtime(point["t"] + step_s))
        said = [f"{point['requests'] / step_s:.1f} requests/s", f"{point['tokens'] / step_s:.0f} tokens/s"]
        if times := point["ttft_ms"]:
            said.append(f"TTFT p50 {times['p50']:.0f} ms, p99 {times['p99']:.0f} ms")
        if times := point["tpot_ms"]:
            said.append(f"TPOT p50 {times['p50']:.1f} ms")
        said += [f"{count} {code}" for code, count in point["refused"].items()]
        if point["failed"]:
            said.append(f"{point['failed']} failed")
        return f"{at} {', '.join(said)}"


def placed(said: dict[str, Any]) -> Iterator[str]:
    """Where things run: replicas, pool and nodes of the `models` event, as far as it tells them. Pure."""
    names = {node["id"]: node["name"] for node in said["nodes"]}
    replicas = [
        f"{model['id']} " + ", ".join(_replica(replica, names) for replica in model["replicas"])
        for model in said["models"]
        if model["replicas"]
    ]
    if replicas:
        yield f"replicas: {'; '.join(replicas)}"
    if pool := said["pool"]:
        host = f", {gigabytes(pool['host_used'], '0')} of {gigabytes(pool['host_budget'])} GB host"
        used = f"{gigabytes(pool['gpu_used'], '0')} of {gigabytes(pool['gpu_budget'], '0')} GB"
        yield f"pool: {used}{host if pool['host_budget'] else ''}"
    if said["nodes"]:
        gpus = [f" ({node['gpus_used']:g} of {node['gpus']:g} GPUs)" if node["gpus"] else "" for node in said["nodes"]]
        yield "nodes: " + ", ".join(node["name"] + used for node, used in zip(said["nodes"], gpus, strict=True))


def _replica(replica: dict[str, Any], names: dict[str, str]) -> str:
    where = f" on {names.get(replica['node'], replica['node'][:8])}" if replica["node"] else ""
    return f"{replica['id']}{where}" + ("" if replica["state"] == "awake" else f" {replica['state']}")


def state_of(model: dict[str, Any]) -> str:
    """A model's state in words."""
    state = str(model["phase"] or model["state"])
    state += f" {model['progress']:.0%}" if model["progress"] else ""
    return state + (" (pinned)" if model["pinned"] else "")


def gigabytes(count: int | None, nothing: str = "") -> str:
    """Bytes in GB."""
    return f"{count / 1e9:.1f}" if count else nothing


def ago(seconds: float) -> str:
    """How long ago, short."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return "now" if seconds < 1 else f"{seconds:.0f}s"


def bars(values: list[float | None], width: int) -> str:
    """Values as a line of bars, so many at most: each is the greatest of those that share it. Pure."""
    each = max(1, math.ceil(len(values) / width))
    # Counted from the end, so that a bar keeps its values while time goes on.
    groups = [values[max(0, end - each) : end] for end in range(len(values), 0, -each)][::-1]
    shown = [max((value for value in group if value is not None), default=0.0) for group in groups]
    top = max(shown, default=0.0) or 1.0
    return "".join(_BARS[math.ceil(value / top * (len(_BARS) - 1))] for value in shown)


def _median(percentiles: dict[str, float] | None) -> str:
    return f"{percentiles['p50']:.1f}" if percentiles else ""


def _p50(percentiles: dict[str, float] | None) -> float | None:
    return percentiles["p50"] if percentiles else None
