"""Fault drills on a Ray cluster of fake GPU nodes on this machine, under streaming load; prints what clients saw.

python -m tests.cluster_sim
python -m tests.cluster_sim --drill node --drill deploy --seconds 30 --json run/cluster-sim.json

Exit status 1 where a request met what it must not: see `verdict`.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.report import HEAD
from tests.cluster_sim.deployment import NODES, Deployed, head
from tests.cluster_sim.drills import DRILLS, Simulation, end
from tests.e2e.fake_cluster import fake_cluster
from tests.unit.redis_server import redis_server


def main() -> int:
    """The command."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.cluster_sim", description=__doc__, formatter_class=raw)
    parser.add_argument("--drill", action="append", choices=DRILLS, help="only this; may be given more than once")
    parser.add_argument("--seconds", type=float, default=60, help="how long clients stream in a drill, at least (60)")
    parser.add_argument("--json", type=Path, help="a file for the report, with every request that failed")
    args = parser.parse_args()
    # So that nothing is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with (
        tempfile.TemporaryDirectory(prefix="sw-redis-") as state,
        redis_server(Path(state)) as redis,
        fake_cluster(NODES, head(f"127.0.0.1:{redis.port}")) as cluster,
    ):
        service = Deployed(cluster)
        began = time.monotonic()
        service.start()
        print(f"{len(service.nodes())} GPU nodes, and all replicas after {time.monotonic() - began:.0f} s\n\n{HEAD}")
        simulation = Simulation(cluster, service, args.seconds)
        for drill in (*(DRILLS[name] for name in args.drill or DRILLS), end):
            try:
                drill(simulation)
            except AssertionError as error:
                simulation.not_met(f"{drill.__name__}: {error}")
    broken = simulation.broken
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        report = {"seconds": args.seconds, "broken_promises": broken, "drills": simulation.results}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{len(broken)} promises not met" if broken else "every promise was kept")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
