"""`make observe`: Prometheus beside a service on this machine, with our alerts. From PATH, or from Debian's package.

python -m tools.observe.local [--url http://127.0.0.1:8000] [--port 9090] [--key KEY]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
import yaml

from tools.observe.__main__ import REPOSITORY

_RUN = REPOSITORY / "run" / "observe"
_DISCOVERY = "prom_metrics_service_discovery.json"


def configuration(url: str, ray_dir: Path, key: str = "") -> str:
    """What Prometheus is to scrape: Ray's metrics agents, and the engines through the Router. Pure."""
    parts = urlsplit(url)
    engines: dict[str, object] = {
        "job_name": "switchyard-engines",
        "scheme": parts.scheme,
        "metrics_path": "/v1/router/metrics",
        "static_configs": [{"targets": [parts.netloc]}],
    }
    if key:
        engines["authorization"] = {"credentials": key}
    made = {
        "global": {"scrape_interval": "5s", "evaluation_interval": "15s"},
        "rule_files": [str(REPOSITORY / "monitoring" / "alerts.yaml")],
        "scrape_configs": [
            {"job_name": "ray", "file_sd_configs": [{"files": [str(ray_dir / _DISCOVERY)]}]},
            engines,
        ],
    }
    return yaml.safe_dump(made, sort_keys=False)


def prometheus() -> Path:
    """The program; Debian's package is unpacked below `run/`, and not installed. Raises `SystemExit`."""
    if found := shutil.which("prometheus"):
        return Path(found)
    unpacked = _RUN / "debian" / "usr" / "bin" / "prometheus"
    if unpacked.exists():
        return unpacked
    if not shutil.which("apt-get"):
        raise SystemExit("there is no prometheus on PATH, and no apt-get to fetch it with")
    package = _RUN / "package"
    package.mkdir(parents=True, exist_ok=True)
    print("fetching Debian's package of Prometheus into run/observe")
    try:
        subprocess.run(["apt-get", "download", "--quiet", "prometheus"], cwd=package, check=True)
        subprocess.run(["dpkg", "-x", *map(str, package.glob("prometheus_*.deb")), str(_RUN / "debian")], check=True)
    except subprocess.CalledProcessError:
        raise SystemExit("prometheus could not be had: install it, or run `apt-get update` first") from None
    return unpacked


def main(
    url: Annotated[str, typer.Option(help="The front door.")] = "http://127.0.0.1:8000",
    port: Annotated[int, typer.Option(help="Of Prometheus, on the loopback address.")] = 9090,
    key: Annotated[str, typer.Option(help="An operator's key, where there are keys.", envvar="SWITCHYARD_KEY")] = "",
    ray_dir: Annotated[Path | None, typer.Option(help="Ray's temporary directory.")] = None,
) -> None:
    """Run Prometheus until Ctrl-C."""
    where = ray_dir or Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray"
    program = prometheus()
    _RUN.mkdir(parents=True, exist_ok=True)
    # Prometheus looks for the file in it for ever, but gives up on a directory that Ray has not made yet.
    where.mkdir(parents=True, exist_ok=True)
    file = _RUN / "prometheus.yaml"
    file.touch(0o600)
    file.write_text(configuration(url, where, key))
    print(f"Prometheus: http://127.0.0.1:{port} (alerts: /alerts; Ctrl-C ends it)", flush=True)
    os.execv(
        program,
        [
            str(program),
            f"--config.file={file}",
            f"--storage.tsdb.path={_RUN / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
        ],
    )


if __name__ == "__main__":
    typer.run(main)
