"""Every metric of ours: the one list from which they are made, documented, drawn and watched. Plain data.

`docs/metrics.md` is written from it by `python -m tools.observe`.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

# Seconds. From a warm prefix cache to a long queue; a decision takes less than a millisecond, a load minutes.
_LATENCY = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
_PER_TOKEN = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_DECISION = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
_LOAD = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 900.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """One metric as it is made. `bounds`: upper bounds of a histogram's buckets."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    unit: str
    meaning: str
    bounds: tuple[float, ...] = ()

    @property
    def exported(self) -> str:
        """The name under which Prometheus finds it: Ray puts `ray_` before it, and `_total` behind a counter's."""
        return f"ray_{self.name}_total" if self.kind == "counter" else f"ray_{self.name}"

    @property
    def series(self) -> frozenset[str]:
        """The names of its samples."""
        if self.kind == "histogram":
            return frozenset(f"{self.exported}_{part}" for part in ("bucket", "sum", "count"))
        return frozenset({self.exported})


def _counter(name: str, labels: tuple[str, ...], unit: str, meaning: str) -> Metric:
    return Metric(f"switchyard_{name}", "counter", labels, unit, meaning)


def _gauge(name: str, labels: tuple[str, ...], unit: str, meaning: str) -> Metric:
    return Metric(f"switchyard_{name}", "gauge", labels, unit, meaning)


def _histogram(name: str, labels: tuple[str, ...], bounds: tuple[float, ...], meaning: str) -> Metric:
    return Metric(f"switchyard_{name}", "histogram", labels, "seconds", meaning, bounds)


# From the Routers, once for each request, from its audit record.
REQUESTS = _counter(
    "requests",
    ("path", "model", "status"),
    "requests",
    "Requests to the paths that engines answer. `model` is empty where none was decided; 499: the client left first.",
)
REFUSALS = _counter(
    "refusals",
    ("model", "code"),
    "requests",
    "Requests that ended with an error, on a running stream too, by its `code`; `client_left` is one.",
)
TOKENS = _counter(
    "tokens",
    ("key", "model", "kind"),
    "tokens",
    "`prompt`, `completion`, and of these `cached` and `reasoning`. `key` is its configured id, or `anonymous`.",
)
DECISIONS = _counter(
    "decisions",
    ("model", "model_source", "thinking", "thinking_source", "rule", "scorer"),
    "requests",
    "Requests by the model that answered, whether it thought, and where both choices came from.",
)
DEGRADED = _counter("degraded", ("model",), "requests", "Requests that were given less because of the load.")
BATCH_LINES = _counter(
    "batch_lines", ("model", "outcome"), "requests", "Requests of batches, `completed` or `failed`; a retry is another."
)
TTFT = _histogram("ttft_seconds", ("model",), _LATENCY, "Time to first token, from the request's arrival.")
TPOT = _histogram(
    "tpot_seconds", ("model",), _PER_TOKEN, "Time per output token after the first, of streams with two or more."
)
REQUEST = _histogram("request_seconds", ("model",), _LATENCY, "Whole requests that were answered.")
QUEUE = _histogram("queue_seconds", ("model",), _LATENCY, "Wait for a place, of requests that waited for one.")
HOLD = _histogram("hold_seconds", ("model",), _LATENCY, "Wait for the model to load or wake, of requests that waited.")
DECISION = _histogram(
    "decision_seconds", ("source",), _DECISION, "Time to decide. `source`: where the choice of the model came from."
)
AUDIT_DROPPED = _counter("audit_dropped", (), "records", "Audit records that could not be written.")

# From the Routers, as things are.
OPEN = _gauge("open_requests", (), "requests", "Requests in this Router, whatever they wait for.")
QUEUED = _gauge("queued_requests", ("model",), "requests", "Requests that wait in this Router for a place.")
HELD = _gauge("held_requests", ("model",), "requests", "Requests that wait in this Router for a model to load or wake.")
SHUNNED = _gauge("shunned_replicas", (), "replicas", "Replicas that this Router leaves alone because they failed.")
EXTERNAL_UP = _gauge("external_up", ("model",), "1 or 0", "Whether a server that is not ours answers for the model.")
BATCH_LEFT = _gauge("batch_lines_left", (), "lines", "Lines of the batch that this Router works on, not yet answered.")

# From the replicas that hold engines.
STATE = _gauge(
    "model_state", ("model", "replica", "state"), "1 or 0", "1 for the state that the model is in on the replica."
)
TRANSITIONS = _counter(
    "model_transitions",
    ("model", "from", "to"),
    "transitions",
    "Changes of state. `loading` to `failed`: a load that failed; `awake` to `failed`: an engine that died.",
)
LOAD = _histogram("model_load_seconds", ("model",), _LOAD, "Loads that succeeded, from the start to the first token.")
WAKE = _histogram("model_wake_seconds", ("model",), _LOAD, "Wakes from sleep, to the first token.")
IN_FLIGHT = _gauge("model_in_flight", ("model", "replica"), "requests", "Requests in the engine, those of all Routers.")
WAITING = _gauge(
    "engine_waiting",
    ("model", "replica"),
    "requests",
    "Of these, those not yet begun by its scheduler, or pre-empted.",
)
KV_CACHE = _gauge("kv_cache_usage", ("model", "replica"), "0 to 1", "Part of the engine's KV cache that is in use.")
MODEL_MEMORY = _gauge(
    "model_memory_bytes",
    ("model", "replica"),
    "bytes",
    "What it takes awake: as configured, or measured if more.",
)
POOL_USED = _gauge("pool_memory_used_bytes", ("replica",), "bytes", "Budget of the pool that its models take now.")
POOL_LIMIT = _gauge("pool_memory_limit_bytes", ("replica",), "bytes", "Budget of the pool (`pool.memory_gb`).")
HOST_USED = _gauge(
    "pool_host_memory_used_bytes", ("replica",), "bytes", "Host memory that processes and sleeping models take now."
)
HOST_LIMIT = _gauge(
    "pool_host_memory_limit_bytes", ("replica",), "bytes", "Budget of host memory (`pool.host_memory_gb`); 0: unset."
)
MOVING = _gauge("replica_moving", ("replica",), "1 or 0", "0: the replica's load path is stuck, and Serve replaces it.")

ROUTER_METRICS = (
    REQUESTS,
    REFUSALS,
    TOKENS,
    DECISIONS,
    DEGRADED,
    TTFT,
    TPOT,
    REQUEST,
    QUEUE,
    HOLD,
    DECISION,
    OPEN,
    QUEUED,
    HELD,
    SHUNNED,
    EXTERNAL_UP,
    BATCH_LINES,
    BATCH_LEFT,
    AUDIT_DROPPED,
)
REPLICA_METRICS = (
    STATE,
    TRANSITIONS,
    LOAD,
    WAKE,
    IN_FLIGHT,
    WAITING,
    KV_CACHE,
    MODEL_MEMORY,
    POOL_USED,
    POOL_LIMIT,
    HOST_USED,
    HOST_LIMIT,
    MOVING,
)
METRICS = (*ROUTER_METRICS, *REPLICA_METRICS)
