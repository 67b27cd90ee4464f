"""Runs a program, and all processes that it starts, with the fake device in place of GPUs. Of them it has eight.

    PYTHONPATH=tests/streams python -m fake_device python train.py
    PYTHONPATH=tests/streams python -m fake_device --for-cpu python -m pytest tests/strategy/test_apply_plan.py

With ``--for-cpu`` a Trainer that asks for the CPU gets GPUs, and a group of gloo has NCCL besides: so tests run on the
CUDA path. Tests fail there that count on something that CUDA does not have: a step that has ended once the host is
behind it, gloo's errors where NCCL waits, sparse gradients, or ranks forked from a process that has used the device.
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


def stream_bits(text: str) -> str:
    """Returns the text of a number below 2**64, of which each bit is a stream."""
    try:
        is_valid = 0 <= int(text, 0) < 2**64
    except ValueError:
        is_valid = False
    if not is_valid:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 2**64 - 1, such as 0xffff, got {text!r}")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fake_device", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--for-cpu", action="store_true", help="what asks for the CPU gets the fake device")
    parser.add_argument(
        "--late",
        type=stream_bits,
        help="a bit for each stream that works only when somebody waits for it",
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
            LATE: arguments.late or "",
            "FAKE_DEVICE_FOLDER": folder,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        return subprocess.run(arguments.command, env=os.environ | own, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
