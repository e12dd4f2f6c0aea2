#!/bin/sh
# Installs torch for the CPU engine. For CUDA, vLLM brings the torch it was built with.
# Usage: torch.sh cpu|gpu INDEX_URL
set -eu
TORCH="torch==2.13.0+cpu"

case "$1" in
cpu) pip install --no-deps "$TORCH" || pip install --no-deps --index-url "$2" "$TORCH" ;;
gpu) ;;
*) echo "ENGINE=$1 must be cpu or gpu" >&2; exit 2 ;;
esac
