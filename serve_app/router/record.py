"""The record of one request: who asked, what became of it, and what the audit keeps of that."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Scope, Send

from serve_app.router.auth import CALLER, Caller
from serve_app.router.headers import headers_of
from serve_app.router.reply import Reply
from serve_app.router.tally import Tally
from serve_app.routing.decision import Decision
from serve_app.service_schema import Anonymous
from serve_app.telemetry.tracing import Trace
from serve_app.telemetry.traffic import Step

Keep = Callable[[dict[str, Any], Sequence[Step]], None]
# In the scope: a set that is no longer empty when the request has its audit record.
RECORDED = "switchyard.recorded"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclasses.dataclass(slots=True)
class Asked:
    """One request on its way through: who sent it, how important it is, and what becomes of it. Times in seconds.

    `queued_s`: waited for a place; `held_s`: waited for its model to load; `sent_at`: when an engine got it; `steps`:
    the parts of its way; `batch`: it is a line of one.
    """

    headers: Headers
    caller: Caller
    began: float
    priority: int = 0
    stream: bool = False
    decision: Decision | None = None
    degraded: str = ""
    decision_s: float = 0.0
    queued_s: float = 0.0
    held_s: float = 0.0
    sent_at: float | None = None
    batch: bool = False
    trace: Trace | None = None
    steps: list[Step] = dataclasses.field(default_factory=list)
    tally: Tally = dataclasses.field(default_factory=Tally)

    def step(self, name: str, began: float) -> float:
        """A part of its way has ended just now; returns how long it took."""
        now = time.monotonic()
        self.steps.append((name, began, now))
        return now - began


def request_id(headers: Headers) -> str:
    """The client's own id where it is a sane header value, else a new one."""
    given = headers.get("x-request-id", "")
    return given if given and _REQUEST_ID.fullmatch(given) else new_id()


def new_id() -> str:
    """128 random bits in hex."""
    return os.urandom(16).hex()


def with_request_id(own_id: str, send: Send) -> Send:
    """A `send` whose answers say that id."""
    name, value = b"x-request-id", own_id.encode()

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (name, value)]
        await send(message)

    return sending


def audit_record(path: str, asked: Asked, reply: Reply) -> dict[str, Any]:
    """What the audit keeps of a request: the record of the design. Times in ms."""
    now = time.monotonic()
    tally, decision = asked.tally, asked.decision
    record: dict[str, Any] = {
        "at": round(time.time(), 3),
        "request": reply.headers.get("x-request-id", ""),
        "trace": asked.trace.id if asked.trace else None,
        "key": asked.caller.id,
        "path": path,
        "stream": asked.stream,
        "priority": asked.priority,
        "batch": asked.batch,
        # 499: the client left before it got anything.
        "status": reply.status or 499,
        "error": reply.fault or None,
        "model": None,
        "prompt_tokens": tally.prompt,
        "completion_tokens": tally.completion,
        "reasoning_tokens": tally.reasoning,
        "cached_tokens": tally.cached,
        "finish": tally.finish or None,
        "replica": tally.replica or None,
        "queue_ms": _ms(asked.queued_s),
        "load_ms": _ms(asked.held_s),
        "ttft_ms": None if tally.first_at is None else _ms(tally.first_at - asked.began),
        "engine_ms": None if asked.sent_at is None else _ms(now - asked.sent_at),
        "total_ms": _ms(now - asked.began),
    }
    if decision is not None:
        record |= {
            "model": decision.model_id,
            "model_source": decision.model_source,
            "thinking": decision.thinking,
            "thinking_source": decision.thinking_source,
            "budget": decision.budget,
            "rule": decision.rule,
            "score": round(decision.score.think, 4) if decision.score else None,
            "scorer": decision.score.kind if decision.score else None,
            "decision_ms": _ms(asked.decision_s, 3),
            "fallback": decision.fallback,
            "degraded": asked.degraded or None,
        }
    return record


def refused_record(scope: Scope, own_id: str, status: int, code: str | None) -> dict[str, Any]:
    """What the audit keeps of a request that did not come as far as `Generate`. An unknown key has no name."""
    headers = headers_of(scope)
    caller: Caller | None = scope.get(CALLER)
    asked = Asked(headers, caller or Caller("", Anonymous()), time.monotonic())
    reply = Reply(_nowhere, stream=False)
    reply.headers["x-request-id"] = own_id
    reply.status, reply.fault = status, code or ""
    return audit_record(scope["path"], asked, reply)


async def _nowhere(message: Message) -> None:
    raise AssertionError("it was answered elsewhere")


def _ms(seconds: float, digits: int = 1) -> float:
    return round(seconds * 1000, digits)
