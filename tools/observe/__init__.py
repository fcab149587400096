"""Dashboards, alerts and the page on metrics, written from the table of metrics (`telemetry/metric_table.py`)."""
