"""Runs ``joining_script`` on hosts of the lab, in several cases side by side; run by ``test_join_watch``.

Usage: joining_lab.py CASES LIMIT_S

CASES is a JSON list of lists: the number of hosts, and the arguments of ``joining_script``. Prints a JSON list of what
the ranks of each case have said, or null where none of them has failed. All ranks are forked from this process, so that
they come at the same time.
"""

import json
import multiprocessing
import sys
from functools import partial

import joining_script

from lightning_commopt.launch.fork_server import preload
from lightning_commopt.launch.lab import NetLab, RankError


def run(limit_s: float, case: list[object]) -> list[str] | None:
    """Runs one case in a process of its own."""
    num_hosts, *arguments = case
    assert isinstance(num_hosts, int)
    preload(joining_script.__name__)
    command = [sys.executable, "-m", joining_script.__name__, *map(str, arguments)]
    with NetLab(num_hosts) as lab:
        try:
            lab.run(command, environment={"OMP_NUM_THREADS": "1"}, timeout_s=limit_s)
        except RankError as error:
            return error.outputs
    return None


def main() -> None:
    cases, limit_s = json.loads(sys.argv[1]), float(sys.argv[2])
    with multiprocessing.get_context("fork").Pool(len(cases)) as pool:
        print(json.dumps(pool.map(partial(run, limit_s), cases, chunksize=1)))


if __name__ == "__main__":
    main()
