"""Runs a program, and all processes that it starts, with the fake device in place of GPUs. Of them it has eight.

    PYTHONPATH=tests/streams python -m fake_device python train.py
    PYTHONPATH=tests/streams python -m fake_device --for-cpu python -m pytest tests/strategy/test_apply_plan.py

With ``--for-cpu`` a Trainer that asks for the CPU gets GPUs, and a group of gloo has NCCL besides: so tests run on the
CUDA path. Those fail that count on what a CPU does: that a step has ended when the host is behind it, that gloo raises
where NCCL waits, that ranks can be forked from a process that has used the device, sparse gradients.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from fake_device.build import Unavailable, libraries
from fake_device.everywhere import FOR_CPU, LATE, LIBRARIES


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fake_device", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--for-cpu", action="store_true", help="what asks for the CPU gets the fake device")
    parser.add_argument(
        "--late", default="", help="a bit for each stream that works only when somebody waits for it, such as 0xffff"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if not arguments.command:
        parser.error("what shall run? Name a program with its arguments")
    try:
        built = libraries()
    except Unavailable as reason:
        parser.error(str(reason))
    here = Path(__file__).parent
    paths = [str(here / "site"), str(here.parent), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as folder:
        own = {
            LIBRARIES: os.pathsep.join(map(str, built)),
            FOR_CPU: "1" if arguments.for_cpu else "",
            LATE: arguments.late,
            "FAKE_DEVICE_FOLDER": folder,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        return subprocess.run(arguments.command, env=os.environ | own, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
