"""`serve run FILE` on a Ray of its own without the dashboard, which takes most of Ray's start:
`python -m tests.e2e.serve_run FILE`.
"""

import sys

import ray
from ray.serve.scripts import cli

if __name__ == "__main__":
    # `serve run` takes a Ray that is there.
    ray.init(address="local", namespace="serve", include_dashboard=False)
    cli(["run", sys.argv[1]])
