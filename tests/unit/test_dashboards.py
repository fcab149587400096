"""tools.observe: dashboards, alerts and pages name what there is, say it in PromQL, and are as the tables have them."""

import json
import re
from pathlib import Path

import pytest
import yaml
from promql_parser import parse

from serve_app.telemetry.metric_table import METRICS
from tools.observe.__main__ import stale
from tools.observe.alerts import ALERTS, happened
from tools.observe.local import configuration
from tools.observe.panels import DASHBOARDS
from tools.observe.written import files

SERIES = {name: metric for metric in METRICS for name in metric.series}
WINDOW = "$__rate_interval"
PANELS = {
    f"{board.uid}: {panel.title} {place}": query.expr
    for board in DASHBOARDS
    for panel in board.panels
    for place, query in enumerate(panel.queries)
}
RULES = {alert.name: alert.expr for alert in ALERTS}
QUERIES = {**PANELS, **RULES}
SELECTOR = re.compile(r"(ray_\w+|vllm:\w+)(?:\{([^}]*)\})?")


@pytest.mark.parametrize("expr", QUERIES.values(), ids=QUERIES.keys())
def test_query_is_promql_of_metrics_and_labels_that_exist(expr: str) -> None:
    parse(expr.replace(WINDOW, "5m"))
    found = SELECTOR.findall(expr)
    assert found
    labels = {"le"}
    for name, matchers in found:
        assert name in SERIES
        for label in re.findall(r"(\w+)\s*(?:=|!)", matchers):
            assert label in SERIES[name].labels
        labels |= set(SERIES[name].labels)
    for group in re.findall(r"\bby \(([^)]*)\)", expr):
        assert {label.strip() for label in group.split(",")} <= labels


@pytest.mark.parametrize("name", RULES.keys())
def test_summary_of_an_alert_uses_labels_that_its_query_keeps(name: str) -> None:
    (alert,) = (alert for alert in ALERTS if alert.name == name)
    for label in re.findall(r"\$labels\.(\w+)", alert.summary):
        grouped = re.findall(r"\bby \(([^)]*)\)", alert.expr)
        metrics = [SERIES[found] for found, _ in SELECTOR.findall(alert.expr)]
        assert all(label in group for group in grouped)
        assert all(label in metric.labels for metric in metrics)


def test_counter_is_rated_and_a_gauge_is_not() -> None:
    for expr in QUERIES.values():
        for name, _ in SELECTOR.findall(expr):
            inside = re.search(rf"(?:rate|increase)\({name}", expr)
            assert bool(inside) == (SERIES[name].kind != "gauge")


def test_every_metric_is_on_a_dashboard() -> None:
    shown = {SERIES[name] for expr in PANELS.values() for name, _ in SELECTOR.findall(expr)}
    assert set(METRICS) == shown


def test_first_time_that_something_happens_is_an_alert() -> None:
    assert "unless" in happened("x_total")
    parse(happened("x_total"))


def test_files_are_as_the_tables_have_them() -> None:
    assert stale() == []


def test_dashboards_are_json_with_panels_side_by_side() -> None:
    boards = [json.loads(content) for name, content in files().items() if name.endswith(".json")]
    assert len({board["uid"] for board in boards}) == len(DASHBOARDS)
    for board in boards:
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
        assert len(set(places)) == len(places)


def test_every_alert_says_what_to_do() -> None:
    page = files()["docs/alerts.md"]
    (group,) = yaml.safe_load(files()["monitoring/alerts.yaml"])["groups"]
    assert [rule["alert"] for rule in group["rules"]] == [alert.name for alert in ALERTS]
    for rule in group["rules"]:
        anchor = rule["annotations"]["runbook"].partition("#")[2]
        assert any(line.lower() == f"## {anchor}" for line in page.splitlines())
    assert all(alert.means and alert.steps for alert in ALERTS)


def test_every_metric_is_documented() -> None:
    page = files()["docs/metrics.md"]
    assert all(f"| `{metric.exported}` | {metric.kind} |" in page for metric in METRICS)


def test_local_prometheus_scrapes_rays_agents_and_the_engines(tmp_path: Path) -> None:
    made = yaml.safe_load(configuration("http://127.0.0.1:8123", tmp_path, key="sk-1"))
    ray, engines = made["scrape_configs"]
    assert ray["file_sd_configs"] == [{"files": [str(tmp_path / "prom_metrics_service_discovery.json")]}]
    assert engines["static_configs"] == [{"targets": ["127.0.0.1:8123"]}]
    assert engines["metrics_path"] == "/v1/router/metrics"
    assert engines["authorization"] == {"credentials": "sk-1"}
    assert all(Path(file).exists() for file in made["rule_files"])
