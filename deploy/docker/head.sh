#!/bin/bash
# The head of the cluster: Ray's, with the scheduler and the gateways; no engine runs here.
# Ends when the lab or Ray's own server does, so that the container starts anew.
set -euo pipefail
node_ip=$(hostname -i | cut -d ' ' -f 1)

# What the containers of one cluster know each other by; workers wait for it.
[ -s "$RAY_AUTH_TOKEN_PATH" ] ||
    (umask 077 && python -c 'import secrets; print(secrets.token_hex(32))' >"$RAY_AUTH_TOKEN_PATH.new" &&
        mv "$RAY_AUTH_TOKEN_PATH.new" "$RAY_AUTH_TOKEN_PATH")

ray start --head --node-ip-address="$node_ip" --port=6379 --num-cpus=0 --num-gpus=0 --include-dashboard=false \
    --object-store-memory="$TANDEM_OBJECT_STORE_BYTES"
# Ray is new: what an earlier life of this container left on the one before is gone with it.
rm -f "$TANDEM_STATE/lab.json"
tandem up --address "$node_ip:6379" --host 0.0.0.0 --config "$TANDEM_CONFIG" &
lab=$!
tail --pid="$(pidof gcs_server)" -f /dev/null &
ray=$!

is_stopping=""
stop() {
    is_stopping=1
    kill -TERM $lab
}
trap stop TERM INT
code=0
wait -n $lab $ray || code=$?
# One signal and no second: that would cut short the answers which still run.
[ -n "$is_stopping" ] || kill -TERM $lab 2>/dev/null || true
wait $lab || code=$?
exit $code
