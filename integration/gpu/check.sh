#!/usr/bin/env bash
# Check kvplugin's kernels on the GPU of this machine, in under eight minutes: see docs/gpu-results.md.
#
#   integration/gpu/check.sh [gpu-check.json] [--dry-run]
#
# Runs from a checkout, with the Python that `python3` is, or that PYTHON names. Installs nothing, needs no network.
set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m integration.gpu.check "$@"
