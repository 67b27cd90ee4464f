"""What has to be done at the end of a fit is done, even if a handler of a signal raises meanwhile."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from lightning_commopt.callbacks import HangMonitor, RunRecorder, run_recorder
from lightning_commopt.compat.sigterm import run_whatever_handlers_raise
from lightning_commopt.measure.runs.record import RunRecord
from lightning_commopt.watch.hangs import rank_side
from lightning_commopt.watch.hangs.records import read_hang_report
from support.lightnings import DDPStrategy
from support.ranks import run_ranks_or_raise
from support.strategy_models import Tiny, loader, trainer

_LIMIT_S = 120
"""Only against waiting for ever."""


def _raise(number: int, frame: FrameType | None) -> None:
    raise RuntimeError("Connection closed by peer")


@pytest.fixture
def _raising_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, _raise)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_raising_handler")
def test_a_handler_that_raises_cuts_nothing_off() -> None:
    done = []

    def end() -> None:
        for part in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
            done.append(part)

    run_whatever_handlers_raise(end)
    assert done == [0, 1, 2]


def test_ctrl_c_is_not_held_up() -> None:
    interrupted = threading.Event()

    def end() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted.wait(_LIMIT_S)

    with pytest.raises(KeyboardInterrupt):
        run_whatever_handlers_raise(end)
    interrupted.set()


def test_without_another_thread() -> None:
    done: list[bool] = []
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        run_whatever_handlers_raise(lambda: done.append(True))
    assert done == [True]


class _Failing(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 3 and self.global_rank == 1:
            signal.signal(signal.SIGTERM, _raise)  # in place of Lightning's, which raises when rank 0 has ended
            raise ArithmeticError("broken on purpose")
        return super().training_step(batch, batch_idx)


def _after_a_signal(fn: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **options: Any) -> Any:
        if signal.getsignal(signal.SIGTERM) == _raise:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
        return fn(*args, **options)

    return wrapped


def _fit(folder: Path) -> None:
    rank_side.describe_work = _after_a_signal(rank_side.describe_work)
    run_recorder.fail_rank = _after_a_signal(run_recorder.fail_rank)
    callbacks = [RunRecorder(dirpath=folder), HangMonitor(dirpath=folder)]
    trainer(DDPStrategy(), callbacks=callbacks, max_epochs=1).fit(_Failing(), loader(48))


def test_a_launcher_that_ends_the_ranks_hides_no_failure(tmp_path: Path) -> None:
    """If it fails, SIGTERM amid a callback's ``on_exception`` leaves a run that runs for ever, and no report."""
    answers = run_ranks_or_raise(_fit, tmp_path, world_size=2, limit_s=_LIMIT_S)
    assert "ArithmeticError: broken on purpose" in str(answers[1][1])
    assert RunRecord.load(tmp_path).error == "rank 1: ArithmeticError: broken on purpose"
    deadline = time.monotonic() + _LIMIT_S
    while not (tmp_path / "hangs" / "report.json").exists():
        assert time.monotonic() < deadline, [path.read_text() for path in (tmp_path / "hangs").glob("*")]
        time.sleep(0.1)
    diagnosis = read_hang_report(tmp_path / "hangs").diagnosis
    assert diagnosis.sentence.startswith("rank 1 has failed in forward of step 3: ArithmeticError")
