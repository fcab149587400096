#!/usr/bin/env bash
# Takes this worker out of service: Serve starts its replicas elsewhere and lets running answers finish. Returns when no
# replica is left here, at the latest after DRAIN_S. Ray has to be running still. Settings: node.env.example.
set -euo pipefail

: "${NODE_IP:?the address of this node}" "${HEAD_IP:?the address of the head}"
bin=${VENV:-/opt/switchyard/.venv}/bin
address=$HEAD_IP:${RAY_PORT:-6379}
deadline=$((SECONDS + ${DRAIN_S:-660}))

node_id=$("$bin/python" - "$address" "$NODE_IP" <<'PY'
import sys

import ray

address, node_ip = sys.argv[1:]
ray.init(address=address, namespace="serve", log_to_driver=False, configure_logging=False)
print(next((n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeManagerAddress"] == node_ip), ""))
PY
)
if [[ -z $node_id ]]; then
  echo "drain-node.sh: $NODE_IP is no living node of $address" >&2
  exit 1
fi

# A command that Ray hides from its help and promises no stability for; autoscaler and KubeRay drain by the same call.
# The reason is what makes Serve move replicas: for the other one Ray refuses nodes that are in use.
"$bin/ray" drain-node --address="$address" --node-id="$node_id" --reason=DRAIN_NODE_REASON_PREEMPTION \
  --reason-message='stopped by its operator' --deadline-remaining-seconds="${DRAIN_S:-660}"

# Replicas are children of this node's raylet; where that has ended there are none.
replicas() {
  local raylet
  raylet=$(pgrep --full "raylet/raylet .*--node_ip_address=$NODE_IP( |$)") || return 1
  pgrep --parent "${raylet//$'\n'/,}" --full '^ray::ServeReplica' >/dev/null
}

while replicas; do
  if ((SECONDS >= deadline)); then
    echo 'drain-node.sh: replicas are left after DRAIN_S; is there room for them on other nodes?' >&2
    exit 1
  fi
  sleep 2
done
