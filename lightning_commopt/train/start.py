"""The console command ``commopt-train``: its help, which needs neither torch nor Hydra, and everything else."""

from __future__ import annotations

import sys
from pathlib import Path

from lightning_commopt.launch.conf_path import conf_dir

_ABOUT = """\
commopt-train trains one configuration, or with -m a sweep of several, one after another in fresh processes. Each run
leaves its numbers in a directory of its own; a sweep ends in a table, an answer and report.html.

usage: commopt-train [-m] [GROUP=OPTION ...] [name.of.a.value=VALUE ...]

  commopt-train -m experiment=quickstart               three plans for a small GPT on a slow link, in minutes
  commopt-train -m strategy/comm_hook=none,bf16 ranks=2 link=1gbit
  commopt-train trainer.max_steps=50 strategy.bucket_cap_mb=100
  commopt-train --cfg job                              prints the configuration, and every value that can be set

groups (GROUP=OPTION):
"""
_FLAGS = """
--cfg job prints the configuration, --hydra-help the other flags of Hydra.
docs/how_to/experiments.md has the experiments.
"""


def config_groups(folder: Path) -> dict[str, list[str]]:
    """Returns the options of each group of ``commopt-train``; those for other projects are in ``downstream``."""
    groups: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.yaml")):
        group = path.parent.relative_to(folder).as_posix()
        if group.split("/")[0] not in (".", "downstream"):
            groups.setdefault(group, []).append(path.stem)
    return groups


def main() -> None:
    """Runs ``commopt-train`` with the arguments of this process."""
    if {"-h", "--help"}.intersection(sys.argv[1:]):
        groups = config_groups(conf_dir())
        width = max(map(len, groups))
        lines = [f"  {group:<{width}}  {', '.join(options)}" for group, options in groups.items()]
        print(f"{_ABOUT}{chr(10).join(lines)}\n{_FLAGS}", end="")
        return
    from lightning_commopt.train import train  # torch and Lightning take seconds

    train.main()
