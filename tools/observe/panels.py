"""What the dashboards show: each panel's queries, in the names under which Prometheus finds our metrics."""

from __future__ import annotations

import dataclasses

# Grafana's own: long enough for four scrapes, whatever the zoom.
_RATE = "[$__rate_interval]"


@dataclasses.dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel and how its series are called there."""

    expr: str
    legend: str


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `unit` in Grafana's words. `kind`: `timeseries`, `stat`, or `table` for what is now."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    stacked: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard; `uid` is its name in addresses."""

    uid: str
    title: str
    panels: tuple[Panel, ...]


def _rate(metric: str, by: str, where: str = "") -> str:
    return f"sum by ({by}) (rate(ray_switchyard_{metric}_total{where}{_RATE}))"


def _quantile(share: float, metric: str, by: str = "model") -> str:
    return f"histogram_quantile({share}, sum by ({by}, le) (rate(ray_switchyard_{metric}_bucket{_RATE})))"


def _quantiles(metric: str, by: str = "model") -> tuple[Query, ...]:
    return tuple(Query(_quantile(share, metric, by), f"p{share * 100:g} {{{{{by}}}}}") for share in (0.5, 0.95, 0.99))


def _mean(metric: str) -> str:
    return (
        f"sum by (model) (rate(ray_switchyard_{metric}_sum{_RATE}))"
        f" / sum by (model) (rate(ray_switchyard_{metric}_count{_RATE}))"
    )


def _one(expr: str, legend: str) -> tuple[Query, ...]:
    return (Query(expr, legend),)


def _share(metric: str, part: str, whole: str) -> tuple[Query, ...]:
    return _one(f"{_rate(metric, 'model', part)} / {_rate(metric, 'model', whole)}", "{{model}}")


OVERVIEW = Dashboard(
    "switchyard-overview",
    "Switchyard: overview",
    (
        Panel("Requests a second", "reqps", _one(_rate("requests", "model"), "{{model}}"), stacked=True),
        Panel("By status", "reqps", _one(_rate("requests", "status"), "{{status}}"), stacked=True),
        Panel(
            "Part that fails (5xx)",
            "percentunit",
            _one(
                f'(sum(rate(ray_switchyard_requests_total{{status=~"5.."}}{_RATE})) or vector(0))'
                f" / sum(rate(ray_switchyard_requests_total{_RATE}))",
                "5xx",
            ),
        ),
        Panel("Refusals by reason", "reqps", _one(_rate("refusals", "code"), "{{code}}"), stacked=True),
        Panel("Time to first token", "s", _quantiles("ttft_seconds")),
        Panel("Time per output token", "s", _quantiles("tpot_seconds")),
        Panel("Whole requests", "s", _quantiles("request_seconds")),
        Panel(
            "In the service now",
            "short",
            (
                Query("sum(ray_switchyard_open_requests)", "open"),
                Query("sum(ray_switchyard_queued_requests)", "wait for a place"),
                Query("sum(ray_switchyard_held_requests)", "wait for a load"),
            ),
        ),
        Panel("Tokens a second", "short", _one(_rate("tokens", "kind"), "{{kind}}")),
        Panel("Given less because of load", "reqps", _one(_rate("degraded", "model"), "{{model}}")),
    ),
)
MODELS = Dashboard(
    "switchyard-models",
    "Switchyard: models and residency",
    (
        Panel(
            "States now", "short", _one("max by (model, replica, state) (ray_switchyard_model_state) == 1", ""), "table"
        ),
        Panel(
            "Servers that are not ours", "bool_on_off", _one("min by (model) (ray_switchyard_external_up)", "{{model}}")
        ),
        Panel(
            "Models in each state",
            "short",
            _one("sum by (state) (ray_switchyard_model_state)", "{{state}}"),
            stacked=True,
        ),
        Panel(
            "Transitions a minute",
            "short",
            _one(f"60 * sum by (from, to) (rate(ray_switchyard_model_transitions_total{_RATE}))", "{{from}} to {{to}}"),
        ),
        Panel("Loads", "s", _quantiles("model_load_seconds")),
        Panel("Wakes", "s", _quantiles("model_wake_seconds")),
        Panel("Wait for a load, of those that waited", "s", _quantiles("hold_seconds")),
        Panel(
            "Requests that wait for a load", "short", _one("sum by (model) (ray_switchyard_held_requests)", "{{model}}")
        ),
        Panel(
            "Memory of the pool",
            "bytes",
            (
                Query("ray_switchyard_pool_memory_used_bytes", "used {{replica}}"),
                Query("ray_switchyard_pool_memory_limit_bytes", "budget {{replica}}"),
            ),
        ),
        Panel(
            "Host memory of the pool",
            "bytes",
            (
                Query("ray_switchyard_pool_host_memory_used_bytes", "used {{replica}}"),
                Query("ray_switchyard_pool_host_memory_limit_bytes > 0", "budget {{replica}}"),
            ),
        ),
        Panel("Memory by model", "bytes", _one("max by (model) (ray_switchyard_model_memory_bytes)", "{{model}}")),
        Panel(
            "Load path moves", "bool_on_off", _one("min by (replica) (ray_switchyard_replica_moving)", "{{replica}}")
        ),
    ),
)
ROUTING = Dashboard(
    "switchyard-routing",
    "Switchyard: routing",
    (
        Panel("Model chosen by", "reqps", _one(_rate("decisions", "model_source"), "{{model_source}}"), stacked=True),
        Panel("Answered by", "reqps", _one(_rate("decisions", "model"), "{{model}}"), stacked=True),
        Panel(
            "Part that thinks",
            "percentunit",
            _share("decisions", '{thinking="on"}', ""),
        ),
        Panel("Thinking chosen by", "reqps", _one(_rate("decisions", "thinking_source"), "{{thinking_source}}")),
        Panel("Rules that matched", "reqps", _one(_rate("decisions", "rule", '{rule!=""}'), "{{rule}}")),
        Panel("Scorers", "reqps", _one(_rate("decisions", "scorer", '{scorer!=""}'), "{{scorer}}")),
        Panel("Time to decide", "s", _quantiles("decision_seconds", "source")),
        Panel("Wait for a place, of those that waited", "s", _quantiles("queue_seconds")),
        Panel("Replicas left alone", "short", _one("max(ray_switchyard_shunned_replicas)", "replicas")),
    ),
)
CAPACITY = Dashboard(
    "switchyard-capacity",
    "Switchyard: capacity and cost",
    (
        Panel("Tokens by key, a second", "short", _one(_rate("tokens", "key"), "{{key}}"), stacked=True),
        Panel(
            "Tokens by key, last 24 hours",
            "short",
            _one("sum by (key, model, kind) (increase(ray_switchyard_tokens_total[24h]))", ""),
            "table",
        ),
        Panel(
            "Prompt tokens that the cache had",
            "percentunit",
            _share("tokens", '{kind="cached"}', '{kind="prompt"}'),
        ),
        Panel(
            "Output tokens spent on thinking",
            "percentunit",
            _share("tokens", '{kind="reasoning"}', '{kind="completion"}'),
        ),
        Panel(
            "In engines", "short", _one("sum by (model) (ray_switchyard_model_in_flight)", "{{model}}"), stacked=True
        ),
        Panel("Wait inside engines", "short", _one("sum by (model) (ray_switchyard_engine_waiting)", "{{model}}")),
        Panel("KV cache in use", "percentunit", _one("ray_switchyard_kv_cache_usage", "{{model}} {{replica}}")),
        Panel("Wait for a place", "short", _one("sum by (model) (ray_switchyard_queued_requests)", "{{model}}")),
        Panel("Mean time of a request", "s", _one(_mean("request_seconds"), "{{model}}")),
        Panel(
            "Lines of batches a second", "reqps", _one(_rate("batch_lines", "model, outcome"), "{{model}} {{outcome}}")
        ),
        Panel("Lines left of the batch", "short", _one("max(ray_switchyard_batch_lines_left)", "lines")),
        Panel(
            "Audit records lost", "short", _one("sum(increase(ray_switchyard_audit_dropped_total[1h]))", "in an hour")
        ),
    ),
)
DASHBOARDS = (OVERVIEW, MODELS, ROUTING, CAPACITY)
