#!/usr/bin/env bash
# Makes an environment for each tool that the client is checked against: ${TANDEM_CACHE:-~/.cache/tandem}/crosscheck/<tool>.
# A second run takes no time. A tool that cannot be installed is named, and the check then says so in its table.
# TORCH_INDEX_URL: package index of torch's CPU wheel, where pip does not find that wheel without it.
set -euo pipefail
cd "$(dirname "$0")"
CACHE="${TANDEM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/tandem}/crosscheck"
PYTHON="$PWD/../../.venv/bin/python"
mkdir -p "$CACHE"

for list in *.txt; do
    tool="${list%.txt}"
    venv="$CACHE/$tool"
    stamp="$venv/.installed"
    [ "$(cat "$stamp" 2>/dev/null)" = "$(sha256sum <"$list")" ] && continue
    echo "installing $tool in $venv (over 1 GB; log: $CACHE/$tool.log)" >&2
    if "$PYTHON" -m venv "$venv" >"$CACHE/$tool.log" 2>&1 &&
        "$venv/bin/python" -m pip install --no-input -q --no-deps -r "$list" \
            ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} >>"$CACHE/$tool.log" 2>&1; then
        sha256sum <"$list" >"$stamp"
    else
        echo "error: $tool could not be installed:" >&2
        tail -n 3 "$CACHE/$tool.log" | sed 's/^/  /' >&2
        rm -f "$stamp"
    fi
done
