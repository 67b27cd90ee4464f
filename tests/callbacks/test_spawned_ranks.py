"""What the callbacks say of an exception in "ddp_fork", where Lightning calls no ``on_exception`` in the ranks."""

import os
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightning_commopt.callbacks import CommTimeMonitor, HangMonitor, RunRecorder
from lightning_commopt.measure.runs.record import RunRecord
from lightning_commopt.watch.hangs.records import read_hang_report
from support.ranks import PROCESSES
from support.strategy_models import Tiny, loader, trainer

_LIMIT_S = 300


class Failing(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 3 and self.global_rank == 0:
            raise ArithmeticError("broken on purpose")
        return super().training_step(batch, batch_idx)


def _forking(folder: Path) -> Any:
    callbacks = [
        RunRecorder(dirpath=folder),
        CommTimeMonitor(dirpath=folder, every_n_steps=1, num_warmup_steps=0),
        HangMonitor(dirpath=folder),
    ]
    return trainer("ddp_fork", devices=2, callbacks=callbacks)


def _fit(folder: Path) -> None:
    with suppress(Exception):
        _forking(folder).fit(Failing(), loader(48))


def _validate(folder: Path) -> None:
    print("result:", sorted(_forking(folder).validate(Tiny(), loader(8))[0]))


def _run(fn: Callable[[Path], None], folder: Path) -> None:
    output = os.open(folder / "output", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fn(folder)


def _output(fn: Callable[[Path], None], folder: Path) -> str:
    process = PROCESSES.Process(target=_run, args=(fn, folder))
    process.start()
    process.join(_LIMIT_S)
    process.kill()
    process.join()
    return (folder / "output").read_text(encoding="utf-8")


def test_an_exception_in_a_forked_rank_is_known(tmp_path: Path) -> None:
    """If it fails, a run that has failed counts as running for ever, and HangMonitor takes its ranks for killed."""
    output = _output(_fit, tmp_path)
    record = RunRecord.load(tmp_path)
    assert (record.status, record.error) == ("failed", "ArithmeticError: broken on purpose"), output
    assert "Time of a step, over" in output, output
    deadline = time.monotonic() + _LIMIT_S
    while not (tmp_path / "hangs" / "report.json").exists():
        assert time.monotonic() < deadline, (output, [path.read_text() for path in (tmp_path / "hangs").glob("*")])
        time.sleep(0.1)
    sentence = read_hang_report(tmp_path / "hangs").diagnosis.sentence
    assert "rank 0 has failed in forward of step 3: ArithmeticError" in sentence, output


@pytest.mark.exhaustive
def test_results_come_back_from_forked_ranks(tmp_path: Path) -> None:
    output = _output(_validate, tmp_path)
    assert "result: ['val_loss']" in output, output
