#!/usr/bin/env bash
# Makes Prometheus and promtool ready for the tests: those installed, else Debian's package unpacked
# under .tandem/tools. Nothing is installed on the machine and no service is started.
set -euo pipefail
cd "$(dirname "$0")/.."

TOOLS="$PWD/.tandem/tools"
PATH="$TOOLS/usr/bin:$PATH"

if command -v prometheus >/dev/null && command -v promtool >/dev/null; then
    exit 0
fi

printf 'unpacking Prometheus for the tests\n' >&2
mkdir -p "$TOOLS"
cd "$TOOLS"
if ! apt-get download -q prometheus >apt.log 2>&1; then
    # The package lists may be missing or old; only root can fetch them.
    { apt-get update -q && apt-get download -q prometheus; } >>apt.log 2>&1 || {
        printf 'error: no Prometheus: apt-get download prometheus failed (%s)\n' "$TOOLS/apt.log" >&2
        printf '  install it, for example: apt install --no-install-recommends prometheus\n' >&2
        exit 1
    }
fi
dpkg-deb -x prometheus_*.deb .
rm -f prometheus_*.deb
