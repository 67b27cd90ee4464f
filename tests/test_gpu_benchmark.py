"""``benchmarks/gpu.py`` on the CPU: every part runs, and a run that is ended leaves its files and no process."""

import json
import os
import signal
import time
from pathlib import Path

import gpu
import pytest
from gpu_parts import PARTS

from support.marked_processes import Program

pytestmark = pytest.mark.exhaustive

_SCRIPT = str(Path(gpu.__file__))
_LIMIT_S = 550
"""Only against waiting for ever."""


def _dry_run(tmp_path, *options):
    arguments = [_SCRIPT, "--device", "cpu", "--output", str(tmp_path / "found"), *options]
    return Program(arguments, tmp_path)


def _stored(tmp_path):
    (path,) = (tmp_path / "found").glob("gpu_dry_run_*.json")
    return json.loads(path.read_text())


def test_a_whole_dry_run(tmp_path):
    """If it fails, a part cannot run, or what is right on the CPU is not."""
    program = _dry_run(tmp_path, "--limit", "3000")
    assert program.finish(_LIMIT_S) == 0, program.output
    parts = _stored(tmp_path)["parts"]
    assert parts.keys() == PARTS.keys()
    verdicts = {name: {each["verdict"] for each in part["rows"]} for name, part in parts.items()}
    assert verdicts.pop("selftest") == verdicts.pop("selftest_full") == {"not run"}
    verdicts["ladder"] -= {"not run"}  # where there is no lab
    assert all(found and found <= {"right", "measured"} for found in verdicts.values()), verdicts


def test_a_run_that_is_ended_leaves_files_and_no_process(tmp_path):
    """If it fails, the end of a lent machine takes the results along."""
    program = _dry_run(tmp_path, "--parts", "parity")
    try:
        ends_at = time.monotonic() + _LIMIT_S
        while "parity: " not in program.output and time.monotonic() < ends_at:
            time.sleep(0.1)
        os.kill(program.process.pid, signal.SIGTERM)
        assert program.wait(_LIMIT_S), f"{program.processes()} are left: {program.output}"
    finally:
        program.kill()
    assert program.process.returncode == 128 + signal.SIGTERM
    stored = _stored(tmp_path)
    assert stored["ended_by"] == "SIGTERM"
    assert stored["parts"]["parity"]["rows"]
