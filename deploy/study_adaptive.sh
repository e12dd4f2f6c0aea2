#!/usr/bin/env bash
# The study of adaptive decoding on this machine's engines: a profile is made where there is none, the lab is started,
# measured and stopped. Arguments go to `python -m loadtest.study.on_a_lab`.
set -euo pipefail
cd "$(dirname "$0")/.."

TANDEM=.venv/bin/tandem
PROFILE=.tandem/study-adaptive.profile.json
trap '"$TANDEM" down >&2' EXIT

if [ ! -f "$PROFILE" ]; then
    printf 'measuring what the lanes cost (a few minutes, once)\n' >&2
    mkdir -p .tandem
    "$TANDEM" up --config deploy/eagle3.yaml --detach
    "$TANDEM" calibrate --lanes batched,speculative --out "$PROFILE"
    "$TANDEM" down
fi
"$TANDEM" up --config deploy/study-adaptive.yaml --detach
.venv/bin/python -m loadtest.study.on_a_lab --profile "$PROFILE" "$@"
