#!/bin/sh
# Serve, send the gate's load, and record: the same requests under the same names in every run.
#
#     samples/ci/record.sh FILE.isr
#
# PORT (8000), SECONDS_OF_LOAD (60) and RATE (2 requests per second) may be set; a baseline and what
# is compared with it need the same values.
set -eu

port="${PORT:-8000}"
rings=$(mktemp -d) # a folder of its own: `record` also takes what older runs of "gate" left
export INFERSCOPE_DIR="$rings" INFERSCOPE_ENGINE_ID=gate
inferscope serve builtin --port "$port" &
server=$!
trap 'kill "$server" 2>/dev/null || true; rm -rf "$rings"' EXIT
curl -sS -o /dev/null --retry 60 --retry-delay 1 --retry-connrefused "http://127.0.0.1:$port/health"

inferscope record gate -o "$1" &
recorder=$!
inferscope load "http://127.0.0.1:$port" --seed 7 --run-name gate \
    --rate "${RATE:-2}" --duration "${SECONDS_OF_LOAD:-60}" >&2
kill "$server"
wait "$server" || true
wait "$recorder" # it ends with the engine
