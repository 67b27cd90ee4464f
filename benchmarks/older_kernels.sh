#!/usr/bin/env bash
# Compiles one of each of our kernels with the oldest Triton that we support, and with one between it and the present one.
# Usage: benchmarks/older_kernels.sh; PYTHON as for kernels_with_triton.sh.
set -euo pipefail
cd "$(dirname "$0")"
for version in 3.2.0 3.4.0; do
  bash kernels_with_triton.sh "$version" --reduced --capabilities 80 90
done
