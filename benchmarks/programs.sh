#!/usr/bin/env bash
# Runs tests/programs with the libraries that they are about, which no other environment has.
# Usage: benchmarks/programs.sh [pytest arguments]. The environment is build/programs.
set -euo pipefail
cd "$(dirname "$0")/.."

environment=build/programs
[ -d "$environment" ] || uv venv --quiet --python 3.11 "$environment"
install() { uv pip install --quiet --python "$environment/bin/python" "$@"; }
install --group dev --editable '.[ray]' --editable ./diagnose transformers pytorch-forecasting
# Its requirements and those of transformers exclude each other; the tests use its model only.
install --no-deps litgpt psutil
"$environment/bin/python" -c '
from importlib.metadata import version
import litgpt.model, pytorch_forecasting, transformers
names = ("torch", "lightning", "transformers", "pytorch-forecasting", "litgpt", "ray")
print(*(f"{name} {version(name)}" for name in names))'
exec "$environment/bin/python" -m pytest --all -n0 tests/programs "$@"
