#!/usr/bin/env bash
# Compiles our kernels with another version of Triton than the installed one.
# Usage: benchmarks/kernels_with_triton.sh 3.2.0 [arguments of compiled_kernels.py]
# PYTHON is the Python of an environment with this project, by default that of `uv run`.
set -euo pipefail
cd "$(dirname "$0")/.."

version=$1
shift
python=${PYTHON:-$(uv run python -c 'import sys; print(sys.executable)')}
target=build/triton-$version
[ -d "$target" ] || uv pip install --quiet --no-config --python "$python" --no-deps --target "$target" "triton==$version"
PYTHONPATH="$target${PYTHONPATH:+:$PYTHONPATH}" exec "$python" benchmarks/compiled_kernels.py "$@"
