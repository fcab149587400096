#!/usr/bin/env bash
# Checks the deployment file and gives it to Serve on this head, waiting for Ray to listen. Settings: node.env.example.
set -euo pipefail

bin=${VENV:-/opt/switchyard/.venv}/bin
file=${DEPLOYMENT:-/opt/switchyard/deployments/prod.yaml}
deadline=$((SECONDS + ${START_S:-120}))

"$bin/python" -m serve_app check "$file"
until (exec 3<>/dev/tcp/127.0.0.1/8265) 2>/dev/null; do
  if ((SECONDS >= deadline)); then
    echo 'deploy.sh: nothing listens on 127.0.0.1:8265; is the head running?' >&2
    exit 1
  fi
  sleep 1
done
exec "$bin/serve" deploy --address http://127.0.0.1:8265 "$file"
