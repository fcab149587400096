"""`GET /v1/router/metrics`: the engines' own metrics, vLLM's, of all that are awake, as one page for Prometheus.

Asked for when somebody scrapes. They are not put into Ray's: that has no way to pass on a histogram's buckets, and
vLLM's own bridge to it runs inside Ray workers only, which engine hosts are not, on purpose.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import Response

from serve_app.router.admin import require_operator
from serve_app.router.auth import CALLER
from serve_app.router.fleet import Fleet
from serve_app.router.relay import Relay

_TIMEOUT_S = 3.0
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


class EngineMetrics:
    """For operators only: the page names every model."""

    def __init__(self, fleet: Fleet, relay: Relay) -> None:
        self._fleet = fleet
        self._relay = relay

    async def read(self, request: Request) -> Response:
        """One page; engines that do not answer at once are not on it."""
        require_operator(request.scope[CALLER])
        engines = self._fleet.engines()
        pages = await asyncio.gather(*(self._relay.fetch(target, "/metrics", _TIMEOUT_S) for _, target in engines))
        named = [
            ({"model": model, "replica": target.replica_id}, page.decode())
            for (model, target), page in zip(engines, pages, strict=True)
            if page is not None
        ]
        return Response(merged(named), headers={"content-type": EXPOSITION})


def merged(pages: Iterable[tuple[dict[str, str], str]]) -> str:
    """Pages in Prometheus' text format as one: each sample gets its page's labels, each family one head. Pure.

    Faulty lines are left out. The format: https://prometheus.io/docs/instrumenting/exposition_formats/
    """
    heads: dict[str, dict[str, str]] = {}
    samples: dict[str, list[str]] = {}
    for labels, page in pages:
        own = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
        family = ""
        for line in page.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                _, word, family, *_ = line.split(" ", 3)
                heads.setdefault(family, {}).setdefault(word, line)
            elif line and not line.startswith("#") and (sample := _labelled(line, own)):
                # A sample belongs to the head before it, or is without one.
                samples.setdefault(family, []).append(sample)
    lines = [line for family, found in samples.items() for line in (*heads.get(family, {}).values(), *found)]
    return "".join(line + "\n" for line in lines)


def _labelled(line: str, own: str) -> str:
    name, brace, rest = line.partition("{")
    if brace:
        return f"{name}{{{own}{'' if rest.startswith('}') else ','}{rest}"
    name, space, value = line.partition(" ")
    return f"{name}{{{own}}} {value}" if space else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
