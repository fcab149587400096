"""`drain` where there is nothing to drain; on a cluster: tests/e2e/test_cluster.py."""

from __future__ import annotations

from typer.testing import CliRunner

from serve_app.cli import app


def test_without_such_a_node_it_says_so_and_fails() -> None:
    result = CliRunner().invoke(app, ["drain", "--deadline-s", "5", "--node-id", "0" * 56])
    assert result.exit_code == 1
    assert "0 Ray nodes found on this machine" in " ".join(result.output.split())
