#!/usr/bin/env bash
# Runs the tests with the oldest Python and the oldest direct dependencies that pyproject.toml allows.
# Usage: benchmarks/oldest.sh [pytest arguments]. The environment is build/oldest.
set -euo pipefail
cd "$(dirname "$0")/.."

environment=build/oldest
rm -rf "$environment"  # uv would keep newer versions that an earlier run left here
uv venv --quiet --python 3.10 "$environment"
# --no-config: the pins under tool.uv are the newest versions.
uv pip install --no-config --python "$environment/bin/python" --resolution lowest-direct --group dev --editable . --editable ./diagnose
"$environment/bin/python" -c '
import sys
from importlib.metadata import version
names = ("torch", "lightning", "pytorch-lightning", "hydra-core", "omegaconf")
print("python", sys.version.split()[0], *(f"{name} {version(name)}" for name in names))'
status=0
"$environment/bin/python" -m pytest "$@" || status=1
bash benchmarks/older_kernels.sh || status=1
exit "$status"
