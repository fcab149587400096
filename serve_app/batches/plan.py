"""PURE. The lines of a batch: which are valid, in which order they run, how many at once, and what is tried again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import orjson

from serve_app.service_schema import Batches

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
MAX_PROBLEMS = 100
# Clients' requests have 0, or what their key may.
OFFLINE_PRIORITY = -10
_MAX_ID_CHARS = 512
_BOM = b"\xef\xbb\xbf"


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One request, by where it stands in its file: `size` bytes from `start`. `model` as the client wrote it, or ""."""

    number: int
    custom_id: str
    url: str
    model: str
    start: int
    size: int


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """Why a batch cannot run, in OpenAI's fields. `line` counts from 1; None: the whole file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What a file holds. It may run if there are no problems."""

    lines: tuple[Line, ...]
    problems: tuple[Problem, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """What a file may hold. `endpoint`: the only one allowed; None: any of ours."""

    max_lines: int
    max_line_bytes: int
    endpoint: str | None = None


def read_plan(raw_lines: Iterable[bytes], bounds: Bounds) -> Plan:
    """Check every line. `raw_lines` with their line ends, in order, as a binary file yields them; empty ones count."""
    lines: list[Line] = []
    problems: list[Problem] = []
    first_use: dict[str, int] = {}
    start = 0
    for number, raw in enumerate(raw_lines, 1):
        text = (raw.removeprefix(_BOM) if number == 1 else raw).strip()
        if text:
            found = _line(text, number, start, len(raw), bounds)
            if isinstance(found, Line) and found.custom_id in first_use:
                message = f"custom_id is that of line {first_use[found.custom_id]}, too; each must be unique."
                found = Problem("duplicate_custom_id", message, number, "custom_id")
            if isinstance(found, Line):
                first_use[found.custom_id] = number
                lines.append(found)
            else:
                problems.append(found)
        start += len(raw)
        if len(lines) > bounds.max_lines:
            problems.append(Problem("too_many_lines", f"A batch may have {bounds.max_lines} requests."))
            break
        if len(problems) >= MAX_PROBLEMS:
            break
    if not lines and not problems:
        problems.append(Problem("empty_file", "The file holds no requests."))
    return Plan(tuple(lines), tuple(problems))


def _line(text: bytes, number: int, start: int, size: int, bounds: Bounds) -> Line | Problem:
    if len(text) > bounds.max_line_bytes:
        return Problem("line_too_large", f"The line is larger than {bounds.max_line_bytes} bytes.", number)
    try:
        fields = orjson.loads(text)
    except orjson.JSONDecodeError:
        return Problem("invalid_json_line", "The line is not valid JSON.", number)
    if not isinstance(fields, dict):
        return Problem("invalid_json_line", "The line is not a JSON object.", number)
    custom_id, method, url, body = (fields.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID_CHARS:
        return Problem("invalid_custom_id", f"A text of 1 to {_MAX_ID_CHARS} characters.", number, "custom_id")
    if method != "POST":
        return Problem("invalid_method", "The method must be POST.", number, "method")
    if not isinstance(url, str) or url not in ENDPOINTS:
        return Problem("invalid_url", f"The url must be one of {', '.join(ENDPOINTS)}.", number, "url")
    if bounds.endpoint and url != bounds.endpoint:
        return Problem("mismatched_url", f"The url must be the batch's endpoint, {bounds.endpoint}.", number, "url")
    if not isinstance(body, dict):
        return Problem("invalid_body", "The body must be a JSON object.", number, "body")
    if body.get("stream"):
        return Problem("invalid_body", "A batch has no streams; leave `stream` out.", number, "body.stream")
    model = body.get("model") or ""
    if not isinstance(model, str):
        return Problem("invalid_body", "The model must be a name.", number, "body.model")
    return Line(number, custom_id, url, model, start, size)


def body_of(raw: bytes, **defaults: int) -> bytes:
    """The request body of a line that was found valid; `defaults` for fields that it lacks."""
    fields: dict[str, Any] = orjson.loads(raw.strip().removeprefix(_BOM))
    return orjson.dumps({**defaults, **fields["body"]})


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Lines that one engine answers, so that it is loaded once. `engine`: None where the router chooses (`auto`)."""

    engine: str | None
    lines: tuple[Line, ...]


def groups(
    lines: Iterable[Line], engine_of: Callable[[str], str | None], awake: Callable[[str], bool]
) -> Sequence[Group]:
    """The lines by engine: those that are awake first, then as the file has them; the router's choice comes last.

    `engine_of` says which engine answers a model's name: None for `auto`, the name itself where nobody knows it.
    """
    found: dict[str | None, list[Line]] = {}
    for line in lines:
        found.setdefault(engine_of(line.model), []).append(line)
    ranked = sorted(found, key=lambda engine: 2 if engine is None else 0 if awake(engine) else 1)
    # Lines of one model side by side: a base and its adapters share an engine, not a prefix cache.
    return [Group(engine, tuple(sorted(found[engine], key=lambda line: line.model))) for engine in ranked]


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """How busy a model is with requests that are no batch's. `places`: what all its replicas take at once."""

    interactive: int
    places: int


def lane(load: Load, settings: Batches) -> int:
    """How many lines may run now; 0 where interactive load has reached the mark."""
    room = math.floor(load.places * settings.run_below_load) - load.interactive
    if load.interactive == 0:
        room = max(room, 1)
    return max(0, min(room, settings.concurrency))


@dataclasses.dataclass(frozen=True, slots=True)
class Again:
    """A line is tried again after `wait_s`. `pause`: until then no other line of its group is begun either."""

    wait_s: float
    pause: bool


_MAX_WAIT_S = 60.0
_MAX_TRIES = 30
# By error code. A request that kills engines must not kill many; a model that cannot be loaded says so at once.
_TRIES = {"engine_died": 2, "engine_error": 3, "load_failed": 5, "internal_error": 2, "unreachable": 6}
_BUSY = frozenset({429, 503})


def again(status: int, code: str | None, retry_after_s: float | None, tries: int) -> Again | None:
    """Whether a line that was answered so after `tries` tries is tried again; None: the answer stands."""
    if status not in _BUSY and status < 500:
        return None
    limit = _TRIES.get(code or "", _MAX_TRIES if status in _BUSY else 3)
    if tries >= limit:
        return None
    backoff = 0.5 * 2 ** min(tries, 7)
    wait_s = min(max(backoff, retry_after_s or 0.0), _MAX_WAIT_S)
    return Again(wait_s, pause=code not in _TRIES)
