#!/usr/bin/env bash
# Record a small load on a server: record.sh FILE.isr PORT COMMAND...
#
#   samples/engines/record.sh builtin.isr 8000 inferscope serve builtin --port 8000
#   samples/engines/record.sh vllm.isr 8000 vllm serve MODEL --port 8000
#   samples/engines/record.sh sglang.isr 8000 python -m sglang.launch_server --model-path MODEL --port 8000
#
# RATE, SECONDS_OF_LOAD, PROMPT, OUTPUT and SHARED change the load; SEED repeats it.
set -euo pipefail
file=$1 port=$2
shift 2
url=http://127.0.0.1:$port

inferscope run --record "$file" -- "$@" &
server=$!
trap 'kill -INT $server 2>/dev/null || true; wait $server || true' EXIT
for _ in $(seq 600); do
  curl -sf -o /dev/null "$url/v1/models" && break
  kill -0 $server
  sleep 1
done
inferscope load "$url" --rate "${RATE:-3}" --duration "${SECONDS_OF_LOAD:-12}" --seed "${SEED:-1}" \
  --prompt-tokens "${PROMPT:-32..256}" --output-tokens "${OUTPUT:-8..48}" \
  --shared-prefix "${SHARED:-64}"
