"""The files that are written from the tables: Grafana's JSON, Prometheus' rules, and two pages of the documentation."""

from __future__ import annotations

import json
from typing import Any

import yaml

from serve_app.telemetry.metric_table import REPLICA_METRICS, ROUTER_METRICS, Metric
from tools.observe.alerts import ALERTS, Alert
from tools.observe.panels import DASHBOARDS, Dashboard, Panel

_MADE = "Written by `python -m tools.observe`; change the tables there instead."
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT = 12, 8


def files() -> dict[str, str]:
    """Every file's content, by its path in the repository."""
    return {
        **{f"monitoring/dashboards/{board.uid}.json": _dashboard(board) for board in DASHBOARDS},
        "monitoring/alerts.yaml": _rules(),
        "docs/metrics.md": _metrics_page(),
        "docs/alerts.md": _alerts_page(),
    }


def _dashboard(board: Dashboard) -> str:
    made = {
        "uid": board.uid,
        "title": board.title,
        "tags": ["switchyard"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
            ]
        },
        "links": [
            {"type": "dashboards", "title": "Switchyard", "tags": ["switchyard"], "asDropdown": False, "keepTime": True}
        ],
        "panels": [_panel(panel, place) for place, panel in enumerate(board.panels)],
    }
    return json.dumps(made, indent=2) + "\n"


def _panel(panel: Panel, place: int) -> dict[str, Any]:
    is_table = panel.kind == "table"
    made: dict[str, Any] = {
        "id": place + 1,
        "title": panel.title,
        "type": panel.kind,
        "datasource": _SOURCE,
        "gridPos": {"x": place % 2 * _WIDTH, "y": place // 2 * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
                **({"format": "table", "instant": True} if is_table else {}),
            }
            for index, query in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
    }
    if panel.stacked:
        made["fieldConfig"]["defaults"]["custom"] = {"stacking": {"mode": "normal"}, "fillOpacity": 30}
    return made


def _rules() -> str:
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expr,
            "for": alert.waits,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "runbook": f"docs/alerts.md#{alert.name.lower()}"},
        }
        for alert in ALERTS
    ]
    text = yaml.safe_dump({"groups": [{"name": "switchyard", "rules": rules}]}, sort_keys=False, width=120)
    return f"# {_MADE}\n{text}"


def _metrics_page() -> str:
    return f"""# Metrics

<!-- {_MADE} -->

They come out of Ray's metrics agents, one on each node, where Prometheus looks for Ray's own. Ray writes their
addresses into `prom_metrics_service_discovery.json` in its temporary directory; on Kubernetes they are port 8080 of
every pod. Ray adds labels of its own (`NodeAddress`, `WorkerId`, `SessionName`, ...). Numbers are handed on once a
second, and Ray publishes them every few seconds. [`monitoring.md`](monitoring.md) has dashboards and alerts.

No label holds anything that a client made up: models and keys are named by their configured ids, a model that nobody
knows is counted under the empty name, and what is no error code of ours is `other`. `replica` is Serve's id of the
replica; replicas come and go, and Prometheus forgets them with its retention.

## From Routers

{_table(ROUTER_METRICS)}

## From replicas with engines

{_table(REPLICA_METRICS)}

## From engines

vLLM's own metrics ([list](https://docs.vllm.ai/en/stable/usage/metrics.html)) are not among Ray's: Ray has no way to
pass on the buckets of a histogram, and vLLM's bridge to it (`RayPrometheusStatLogger`) runs inside Ray workers only,
which our engine hosts are not, so that a dead or blocked engine takes no replica with it. A Router scrapes them on
demand: `GET /v1/router/metrics`, with an operator's key, answers one page of all engines that are awake, each sample
with `model` and `replica`. Any one Router has all of them: scrape the service's address, not each Router's.
"""


def _table(metrics: tuple[Metric, ...]) -> str:
    lines = ["| name | type | labels | unit | meaning |", "|---|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.exported}` | {metric.kind} | {labels} | {metric.unit} | {metric.meaning} |")
    return "\n".join(lines)


def _alerts_page() -> str:
    return f"""# Alerts

<!-- {_MADE} -->

What each alert of [`monitoring/alerts.yaml`](../monitoring/alerts.yaml) means, and what to do. `page`: somebody gets
up; `ticket`: the next working day. The dashboards named here are in [`monitoring.md`](monitoring.md).

{chr(10).join(_runbook(alert) for alert in ALERTS)}"""


def _runbook(alert: Alert) -> str:
    steps = "\n".join(f"- {step}" for step in alert.steps)
    waits = "" if alert.waits == "0m" else f" for {alert.waits}"
    return f"""## {alert.name}

{alert.severity}{waits}: `{alert.expr}`

{alert.means}

{steps}
"""
