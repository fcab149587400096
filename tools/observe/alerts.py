"""The alerts: when each fires, and what to do then. `docs/alerts.md` and `monitoring/alerts.yaml` are made of them."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True)
class Alert:
    """One alert. `waits`: how long it must be so; `means` and `steps` are for the person who is woken by it."""

    name: str
    expr: str
    waits: str
    severity: Literal["page", "ticket"]
    summary: str
    means: str
    steps: tuple[str, ...]


def happened(selector: str, window: str = "15m") -> str:
    """Whether a counter was raised. `increase` alone misses the first time: there was no 0 before the 1."""
    return f"increase({selector}[{window}]) > 0 or ({selector} unless {selector} offset {window})"


ALERTS = (
    Alert(
        "SwitchyardAbsent",
        "absent(ray_switchyard_open_requests)",
        "5m",
        "page",
        "No Router is seen",
        "Prometheus finds no Router: the service is down, or it is not scraped.",
        (
            "`curl http://ROUTER:8000/ready`. If it answers: are Ray's metrics agents among Prometheus' targets?",
            "If not: `serve status`, then the log of `Router` in Ray's dashboard. A port in use is said at start.",
        ),
    ),
    Alert(
        "SwitchyardFails",
        'sum(rate(ray_switchyard_requests_total{status=~"5.."}[5m]))'
        " / sum(rate(ray_switchyard_requests_total[5m])) > 0.05",
        "5m",
        "page",
        "More than 5 % of requests fail",
        "Clients get 5xx. Refusals for want of room are among them.",
        (
            "See *Refusals by reason* (overview): the code says which part. `engine_died`, `engine_error`: its log."
            " `model_loading`, `no_room`, `too_many_waiting`: room, see below. `internal_error`: a fault of ours, whose"
            " log line has the request's id.",
            "`python -m serve_app usage --by model,error --since 1h` has the same from the audit.",
        ),
    ),
    Alert(
        "SwitchyardSlowFirstToken",
        "histogram_quantile(0.95, sum by (model, le) (rate(ray_switchyard_ttft_seconds_bucket[10m]))) > 10",
        "10m",
        "ticket",
        "The first token of {{ $labels.model }} takes more than 10 s for one of twenty",
        "Requests wait: for a place, for a load, or inside the engine.",
        (
            "Compare *Wait for a place*, *Wait for a load* and *Wait inside engines* (capacity, models) to see which.",
            "A place: more replicas, or `max_ongoing_requests` if the KV cache has room. A load: `tier: resident`,"
            " `preload` or `warm_at`. Inside the engine: shorter prompts, or more replicas.",
        ),
    ),
    Alert(
        "SwitchyardEngineDied",
        happened('ray_switchyard_model_transitions_total{from="awake",to=~"failed|stopped|loading"}'),
        "0m",
        "ticket",
        "An engine of {{ $labels.model }} has died",
        "It is started again by itself; requests that ran on it got `engine_died`.",
        (
            "The replica's log has the engine's last words. `out of memory`: lower `gpu_memory_utilization`,"
            " `max_num_seqs` or `max_model_len`, or raise `memory_gb`.",
            "The same request each time? The audit names those that ended with `engine_died`.",
        ),
    ),
    Alert(
        "SwitchyardLoadFails",
        happened('ray_switchyard_model_transitions_total{from=~"loading|waking",to="failed"}'),
        "0m",
        "ticket",
        "{{ $labels.model }} could not be loaded",
        "It is not tried again before `pool.backoff_s` is over; requests for it get `load_failed`.",
        (
            "`GET /v1/models/ID` says why in `failure`.",
            "`python -m serve_app check FILE` finds wrong engine arguments and missing files without a GPU.",
        ),
    ),
    Alert(
        "SwitchyardThrashes",
        'sum by (model) (increase(ray_switchyard_model_transitions_total{to="loading"}[1h])) > 12',
        "15m",
        "ticket",
        "{{ $labels.model }} is loaded again and again",
        "Models push each other out: more are wanted at the same time than there is room for.",
        (
            "*Memory of the pool* (models): is the budget what the GPU has? `memory_gb` of each model: is it measured?",
            "More replicas of the pool, `host_memory_gb` so that models sleep rather than stop, a longer"
            " `min_residency_s`, or a higher `priority` for what matters.",
        ),
    ),
    Alert(
        "SwitchyardRefusesForRoom",
        "sum by (model) (rate(ray_switchyard_refusals_total"
        '{code=~"overloaded|too_many_waiting|no_room|model_loading|timeout"}[10m])) > 0.1',
        "10m",
        "page",
        "Requests for {{ $labels.model }} are sent away: there is no room",
        "Clients get 503 with `Retry-After`, because places, queue, or the pool's memory are full.",
        (
            "*Wait for a place* and *In engines* (capacity): is it one key? `python -m serve_app usage --by key`.",
            "Limit that key (`requests_per_minute`, `max_concurrent`), add replicas, or raise `queue.size`.",
        ),
    ),
    Alert(
        "SwitchyardKvCacheFull",
        "min by (model) (ray_switchyard_kv_cache_usage) > 0.95 and sum by (model) (ray_switchyard_engine_waiting) > 0",
        "10m",
        "ticket",
        "The KV cache of {{ $labels.model }} is full, and requests wait for it",
        "vLLM pre-empts and computes again: everything of this model gets slower.",
        (
            "Lower `max_ongoing_requests`, or set `kv_cache_limit`: who has no room then waits in our queue, in order.",
            "An FP8 KV cache, more `gpu_memory_utilization`, a smaller `max_model_len`, or another replica.",
        ),
    ),
    Alert(
        "SwitchyardQueues",
        "sum by (model) (ray_switchyard_queued_requests) > 0",
        "15m",
        "ticket",
        "Requests for {{ $labels.model }} have waited for places for a quarter of an hour",
        "Not a burst: there are fewer places than are wanted.",
        ("Autoscale the model (`autoscaling`), or raise `max_replicas` if it does.",),
    ),
    Alert(
        "SwitchyardStuck",
        "min by (replica) (ray_switchyard_replica_moving) == 0",
        "2m",
        "page",
        "The load path of replica {{ $labels.replica }} is stuck",
        "An engine cannot be ended, or its loop stands. Serve replaces the replica; if it goes on, it cannot.",
        (
            "`nvidia-smi` on its node: a process that holds memory and cannot be ended needs a new node.",
            "`kill -9` of what is left; then Serve starts a new replica.",
        ),
    ),
    Alert(
        "SwitchyardExternalDown",
        "max by (model) (ray_switchyard_external_up) == 0",
        "5m",
        "page",
        "No server behind {{ $labels.model }} answers",
        "It is not ours to start.",
        ("The Router's log says what it answered. `external.urls`, its key, its certificate; then whoever runs it.",),
    ),
    Alert(
        "SwitchyardAuditLost",
        happened("ray_switchyard_audit_dropped_total"),
        "0m",
        "ticket",
        "Audit records were lost",
        "Requests are answered, but some are missing from the record.",
        (
            "A full disk, or a directory that cannot be written: the Router's log says so, and the number.",
            "Else the sink is too slow: raise `audit.queue`.",
        ),
    ),
)
