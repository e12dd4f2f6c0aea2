#!/usr/bin/env bash
# Makes .venv in the checkout: the pinned packages of deploy/requirements.lock (what serves) and
# deploy/requirements-dev.lock (what tests, checks and builds it), torch for CPU, and tandem itself.
# A second run takes no time. Settings (environment):
#   PYTHON           the Python to make it with, 3.11 to 3.13; default: the first that fits of python3.11,
#                    python3.12, python3.13, python3
#   TORCH_INDEX_URL  package index of torch's CPU wheel, used only if pip does not find the wheel without it
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH="torch==2.13.0+cpu"
TORCH_INDEX_URL="${TORCH_INDEX_URL:-https://download.pytorch.org/whl/cpu}"
VENV="$PWD/.venv"
LOG="$PWD/.tandem/install.log"
STAMP="$VENV/.tandem-install"
LOCKS=(deploy/requirements.lock deploy/requirements-dev.lock)
SUPPORTED="import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))"
MAX_SILENCE_S=5

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "error: $1"
    shift
    for line in "$@"; do say "  $line"; done
    exit 1
}

supported() { "$1" -c "$SUPPORTED" >/dev/null 2>&1; }

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        supported "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.11 to 3.13 that runs" \
            "it says: $("$PYTHON" --version 2>&1 | head -n 1)"
        printf '%s' "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3; do
        if supported "$candidate"; then
            printf '%s' "$candidate"
            return
        fi
    done
    fail "no Python 3.11 to 3.13 found (tried python3.11, python3.12, python3.13, python3)" \
        "install one, for example: apt install python3.11 python3.11-venv" \
        "or name one: make install PYTHON=/path/to/python3.11"
}

fingerprint() { cat "${LOCKS[@]}" pyproject.toml deploy/install.sh | sha256sum | cut -d ' ' -f 1; }

# The stamp is "installing" or "ready", the path it was made at (scripts in .venv name it), and the fingerprint.
stamp() { printf '%s %s %s\n' "$1" "$VENV" "$(fingerprint)" >"$STAMP"; }

is_sound() {
    supported "$VENV/bin/python" || return 1
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || return 1
    # Without a stamp somebody made it by hand: use it as it is.
    [ ! -e "$STAMP" ] || grep -q "^ready $VENV " "$STAMP"
}

# Packages are found one after another, then installed together: count both, so that neither looks stuck.
count() {
    printf '%s of about %s packages found, %s installed' \
        "$(grep -c -E '^(Collecting|Processing) ' "$LOG" || true)" \
        "$(cat "${LOCKS[@]}" | wc -l)" \
        "$(find "$VENV" -maxdepth 4 -name '*.dist-info' 2>/dev/null | wc -l)"
}

child=""
interrupted() {
    if [ -n "$child" ]; then
        kill "$child" 2>/dev/null || true
        wait "$child" || true
    fi
    say "interrupted; the next run makes the environment anew"
    exit 130
}
trap interrupted INT TERM HUP

# step TITLE COMMAND...: run it with its output in the log, and show that it goes on.
step() {
    local title=$1 start=$SECONDS shown=$SECONDS code=0
    shift
    printf '\n== %s\n' "$*" >>"$LOG"
    say "[$(printf '%4d' "$SECONDS") s] $title"
    "$@" >>"$LOG" 2>&1 &
    child=$!
    while kill -0 "$child" 2>/dev/null; do
        if [ $((SECONDS - shown)) -ge $MAX_SILENCE_S ]; then
            shown=$SECONDS
            say "[$(printf '%4d' "$SECONDS") s] $title ($((SECONDS - start)) s): $(count)"
        fi
        sleep 0.3
    done
    wait "$child" || code=$?
    child=""
    return "$code"
}

explain() {
    say "the end of $LOG:"
    tail -n 15 "$LOG" | cut -c 1-200 | sed 's/^/  /' >&2
    if grep -q "No space left on device" "$LOG"; then
        fail "$1" "the disk is full: the environment takes about 4 GB"
    fi
    fail "$1" "${@:2}"
}

# For `step` only. exec: the process that an interruption ends must be pip itself.
pip_install() { exec "$VENV/bin/python" -m pip install --no-input --progress-bar off --no-deps "$@"; }

make_venv() {
    local python
    python=$(find_python)
    if [ -e "$VENV" ]; then
        [ -e "$VENV/pyvenv.cfg" ] || [ -e "$STAMP" ] || [ -z "$(ls -A "$VENV")" ] ||
            fail "$VENV is there and is no virtual environment" "move it away, then try again"
        say "the environment in .venv is broken or half-made: making it anew"
        rm -rf "$VENV"
    fi
    step "virtual environment with $("$python" --version 2>&1)" "$python" -m venv "$VENV" ||
        explain "$python -m venv failed" "on Debian and Ubuntu: apt install python3-venv (or python3.11-venv)"
}

install_torch() {
    local before
    before=$(wc -l <"$LOG")
    step "$TORCH" pip_install "$TORCH" && return
    tail -n +"$before" "$LOG" | grep -q "No matching distribution found" || explain "pip could not install $TORCH"
    step "$TORCH from $TORCH_INDEX_URL" pip_install --index-url "$TORCH_INDEX_URL" "$TORCH" ||
        explain "no $TORCH in $TORCH_INDEX_URL" "check the network, or set TORCH_INDEX_URL to a package index that has it"
}

if [ -e "$STAMP" ] && [ "$(cat "$STAMP")" = "ready $VENV $(fingerprint)" ] && supported "$VENV/bin/python"; then
    exit 0
fi
mkdir -p "$(dirname "$LOG")"
: >"$LOG"
say "installing into .venv: about 4 minutes and 4 GB the first time; log: $LOG"
is_sound || make_venv
stamp installing
install_torch
step "packages of ${LOCKS[*]}" pip_install "${LOCKS[@]/#/-r}" ||
    explain "pip could not install the packages of ${LOCKS[*]}" "check the network, then run it again"
step "tandem itself" pip_install --no-build-isolation -e . || explain "pip could not install tandem itself"
stamp ready
say "[$(printf '%4d' "$SECONDS") s] done"
