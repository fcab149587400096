#!/usr/bin/env bash
# Starts Ray on this machine in the foreground: start-node.sh head|worker. Settings: node.env.example.
set -euo pipefail

role=${1:-}
: "${NODE_IP:?the address of this node, as the others reach it}"
ray=${VENV:-/opt/switchyard/.venv}/bin/ray
port=${RAY_PORT:-6379}

if [[ ${RAY_AUTH_MODE:-} == token && ! -r ${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token} ]]; then
  echo "start-node.sh: no token in ${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}; copy the head's" >&2
  exit 1
fi

options=(
  --block
  --node-ip-address="$NODE_IP"
  --metrics-export-port="${METRICS_PORT:-8090}"
  --temp-dir="${RAY_DIR:-/var/lib/switchyard/ray}"
  --disable-usage-stats
)
[[ -z ${NODE_CPUS:-} ]] || options+=(--num-cpus="$NODE_CPUS")
[[ -z ${NODE_GPUS:-} ]] || options+=(--num-gpus="$NODE_GPUS")

case $role in
  head)
    # The dashboard stays on the loopback address: it runs code for whoever reaches it. `ssh -L 8265:localhost:8265`.
    options+=(--head --port="$port" --dashboard-host=127.0.0.1)
    # The cluster ends with its head: there is nothing to wait for.
    export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
    ;;
  worker)
    : "${HEAD_IP:?the address of the head}"
    options+=(--address="$HEAD_IP:$port")
    # On SIGTERM Ray (2.60) drains its node for so long at most: Serve starts the replicas elsewhere, running answers
    # finish, and Ray ends when none is left. Its default of 30 s cuts long answers.
    export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S="${DRAIN_S:-720}"
    ;;
  *)
    echo 'usage: start-node.sh head|worker' >&2
    exit 2
    ;;
esac
exec "$ray" start "${options[@]}"
