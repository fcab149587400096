"""The Router's own listener and app in a process without Ray: what a change of the data path gains is seen in seconds.

    python -m benchmarks.bare_router FILE

Models that need a replica of ours are not there; external ones are. The shipped way is `serve run FILE`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from serve_app.check import read_file
from serve_app.config import deployment_name
from serve_app.router.app import RouterApp
from serve_app.router.deployment import NoPool
from serve_app.router.listener import Listener

_IDENTITY = "bare"


async def _serve(file: Path) -> None:
    config = read_file(file).config
    tables = {model.id: deployment_name(model) for model in config.models}
    listener = Listener(config.router, lambda: RouterApp(config, tables, NoPool(), _IDENTITY), _IDENTITY)
    listener.start()
    try:
        await asyncio.Event().wait()
    finally:
        await listener.stop()


def main() -> None:
    """Serve until Ctrl-C."""
    try:
        asyncio.run(_serve(Path(sys.argv[1])))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
