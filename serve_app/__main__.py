"""`python -m serve_app`."""

from serve_app.cli import app

app(prog_name="python -m serve_app")
