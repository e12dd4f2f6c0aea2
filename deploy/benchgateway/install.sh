#!/usr/bin/env bash
# Makes an environment for each gateway that ours is measured beside: ${TANDEM_CACHE:-~/.cache/tandem}/benchgateway/<gateway>.
# A second run takes no time. A gateway that cannot be installed is named, and the benchmark then says so in its table.
set -euo pipefail
cd "$(dirname "$0")"
CACHE="${TANDEM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/tandem}/benchgateway"
PYTHON="$PWD/../../.venv/bin/python"
mkdir -p "$CACHE"

for list in *.txt; do
    gateway="${list%.txt}"
    venv="$CACHE/$gateway"
    stamp="$venv/.installed"
    [ "$(cat "$stamp" 2>/dev/null)" = "$(sha256sum <"$list")" ] && continue
    echo "installing $gateway in $venv (up to 800 MB; log: $CACHE/$gateway.log)" >&2
    if "$PYTHON" -m venv "$venv" >"$CACHE/$gateway.log" 2>&1 &&
        "$venv/bin/python" -m pip install --no-input -q --no-deps -r "$list" >>"$CACHE/$gateway.log" 2>&1; then
        sha256sum <"$list" >"$stamp"
    else
        echo "error: $gateway could not be installed:" >&2
        tail -n 3 "$CACHE/$gateway.log" | sed 's/^/  /' >&2
        rm -f "$stamp"
    fi
done
