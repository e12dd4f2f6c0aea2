#!/bin/bash
# A worker: takes as many engines as its memory holds (TANDEM_ENGINES) and ends with Ray's node, to start anew.
set -euo pipefail
STOP_LIMIT_S=5            # Ray's node takes leave of the head, and waits long for one that is gone
joined=/tmp/tandem-joined # what the health check looks for
rm -f "$joined"
until [ -s "$RAY_AUTH_TOKEN_PATH" ]; do sleep 0.5; done
until : 2>/dev/null >"/dev/tcp/$TANDEM_HEAD/6379"; do sleep 0.5; done

ray start --address="$TANDEM_HEAD:6379" --node-ip-address="$(hostname -i | cut -d ' ' -f 1)" \
    --resources="{\"tandem_engine\": $TANDEM_ENGINES}" --object-store-memory="$TANDEM_OBJECT_STORE_BYTES"
touch "$joined"

node=$(pidof raylet)
stop() {
    kill -TERM "$node"
    timeout $STOP_LIMIT_S tail --pid="$node" -s 0.2 -f /dev/null || true
    exit 0
}
trap stop TERM INT
tail --pid="$node" -f /dev/null &
wait $!
exit 1
