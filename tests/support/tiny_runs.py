"""Runs of ``commopt-train`` in processes of their own, which take as little as a run can."""

import os
import subprocess
import sys
from pathlib import Path

from support.process_groups import is_group_gone, living_members

TINY = (
    "model.width=16",
    "model.num_layers=1",
    "data.batch_size=2",
    "trainer.max_steps=4",
    "trainer.limit_val_batches=1",
    "trainer.accelerator=cpu",
    "num_warmup_steps=1",
)
Ended = subprocess.CompletedProcess[str]
_LIMIT_S = 400  # only against waiting for ever


def commopt_train(*arguments: str, cwd: Path) -> Ended:
    return _finish(_start(*arguments, cwd=cwd))


def interrupt_sweep(number: int, *arguments: str, cwd: Path, after: list[str]) -> tuple[int, int, Ended]:
    """Runs a sweep that gets a signal once it has printed lines with the texts ``after``, one after another.

    Returns the process group of the job that was running, how many processes it had, and how the sweep ended, with what
    it printed afterwards.
    """
    sweep = _start(*arguments, cwd=cwd, stderr=subprocess.STDOUT)
    try:
        assert sweep.stdout is not None
        for text in after:
            next(line for line in sweep.stdout if text in line)
        children = Path(f"/proc/{sweep.pid}/task/{sweep.pid}/children").read_text().split()
        job = next(int(child) for child in children if os.getpgid(int(child)) == int(child))
        num_processes = len(living_members(job))
        sweep.send_signal(number)
        ended = _finish(sweep)
        assert is_group_gone(sweep.pid)
        return job, num_processes, ended
    finally:
        sweep.terminate()
        _finish(sweep)


def _start(*arguments: str, cwd: Path, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "lightning_commopt.train.train", *arguments]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True)


def _finish(process: subprocess.Popen[str]) -> Ended:
    try:
        stdout, stderr = process.communicate(timeout=_LIMIT_S)
    finally:
        process.kill()
        process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
