#!/usr/bin/env bash
# The study of adaptive decoding on this machine's engines: a profile is made where there is none, the lab is started,
# measured and stopped. Arguments go to `python -m loadtest.study.on_a_lab`.
set -euo pipefail
cd "$(dirname "$0")/.."

TANDEM=.venv/bin/tandem
PROFILE=.tandem/study-adaptive.profile.json

# From here on the lab is ours to stop; a lab that runs already is refused, and stays.
up() {
    "$TANDEM" up --config "$1" --detach
    trap '"$TANDEM" down >&2' EXIT
}

if [ ! -f "$PROFILE" ]; then
    printf 'measuring what the lanes cost (a few minutes, once)\n' >&2
    mkdir -p .tandem
    up deploy/eagle3.yaml
    "$TANDEM" calibrate --lanes batched,speculative --out "$PROFILE"
    "$TANDEM" down
    trap - EXIT
fi
up deploy/study-adaptive.yaml
.venv/bin/python -m loadtest.study.on_a_lab --profile "$PROFILE" "$@"
