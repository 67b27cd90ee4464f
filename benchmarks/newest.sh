#!/usr/bin/env bash
# Runs the tests with the newest releases of torch, Lightning and Hydra, pre-releases included.
# Usage: benchmarks/newest.sh [pytest arguments]. The environment is build/newest.
set -euo pipefail
cd "$(dirname "$0")/.."

environment=build/newest
rm -rf "$environment"
uv venv --quiet --python 3.13 "$environment"
# --no-config: the pins under tool.uv are the versions that CI runs.
install() { uv pip install --no-config --quiet --python "$environment/bin/python" "$@"; }
install --group dev --editable . --editable ./diagnose
# One after another: a pre-release that does not install, or that is older than the release, leaves the release in place.
for package in torch torchvision lightning pytorch-lightning hydra-core hydra-submitit-launcher omegaconf; do
  install --prerelease allow --upgrade "$package" || echo "$package: no pre-release installs, the release stays" >&2
done
uv pip check --python "$environment/bin/python" || echo "the requirements above are not met; the tests say whether it matters" >&2
"$environment/bin/python" -c '
import sys
from importlib.metadata import version
names = ("torch", "torchvision", "lightning", "pytorch-lightning", "hydra-core", "omegaconf")
print("python", sys.version.split()[0], *(f"{name} {version(name)}" for name in names))'
exec "$environment/bin/python" -m pytest "$@"
