"""Ctrl-C, and a rank that fails: the table and the verdict come from what there is, and nothing hangs."""

import contextlib
import io
import os
import pickle
import signal
from typing import Any

import pytest
from small_fit import fit

from lightning_commopt import CommOptDDP
from lightning_commopt.callbacks import CommTimeMonitor
from support.lightnings import Callback, LightningModule, Trainer
from support.ranks import run_ranks

SIGINT_AT = 11


class Interrupter(Callback):
    """Presses Ctrl-C on some ranks: a real SIGINT, in the middle of a step."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == SIGINT_AT and trainer.global_rank in self._ranks:
            os.kill(os.getpid(), signal.SIGINT)


class Failure(Callback):
    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == SIGINT_AT:
            raise ArithmeticError("broken on purpose")


def interrupted(
    callback: Callback, options: dict[str, Any], devices: int = 2
) -> tuple[str, str, dict[str, float], str]:
    """Returns what was raised and printed, the summary and the headline."""
    strategy = CommOptDDP(comm_hook="bf16") if devices > 1 else None
    monitor = CommTimeMonitor(save_records=False, **options)
    printed = io.StringIO()
    raised = "nothing"
    with contextlib.redirect_stdout(printed):
        try:
            fit(monitor, strategy, devices, callbacks=[callback], max_steps=100)
        except BaseException as error:  # Lightning makes SystemExit of KeyboardInterrupt
            raised = type(error).__name__
    headline = "" if monitor.verdict is None else monitor.verdict.headline
    # A strategy that has started ranks has their processes, which cannot be pickled.
    assert b"lightning_commopt.strategy" not in pickle.dumps(monitor)
    return raised, printed.getvalue(), monitor.summary, headline


def test_ctrl_c_on_all_ranks() -> None:
    options = {"every_n_steps": 4, "num_warmup_steps": 3}
    (raised, printed, summary, headline), (_, other, _, _) = run_ranks(interrupted, Interrupter((0, 1)), options)
    assert raised == "SystemExit"
    assert "over 5 steps and 2 ranks" in printed  # two windows of 4, less the warm-up
    assert "waits for" in headline
    assert headline.split()[0] in printed
    assert summary["comm_s"] >= summary["exposed_s"] > 0
    assert other == ""


def test_ctrl_c_on_rank_0_only() -> None:
    """Rank 1 is in a collective that never ends; before the first window rank 0 has its own steps only."""
    answers = run_ranks(interrupted, Interrupter((0,)), {"num_warmup_steps": 3})
    raised, printed, summary, headline = answers[0]
    assert raised == "SystemExit"
    assert "over 8 steps and 1 of 2 ranks" in printed
    assert headline
    assert summary["exposed_share"] > 0
    assert answers[1][0] != "nothing"
    assert answers[1][1] == ""


class DeadDevice(Callback):
    """After a CUDA error that sticks every call on the device raises, so no mark can be made any more."""

    def __init__(self, monitor: CommTimeMonitor) -> None:
        self._monitor = monitor

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == SIGINT_AT:
            assert self._monitor._recorder is not None
            self._monitor._recorder._mark = self.fail
            raise ArithmeticError("broken on purpose")

    @staticmethod
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def _fail_with_the_device() -> None:
    monitor, strategy = CommTimeMonitor(save_records=False, num_warmup_steps=3), CommOptDDP()
    with pytest.raises(ArithmeticError, match="broken on purpose"):
        fit(monitor, strategy, devices=1, callbacks=[DeadDevice(monitor)], max_steps=100)
    assert not strategy.sync_observers


def test_a_device_that_failed_hides_no_exception() -> None:
    """If it fails, the user sees an error of ours instead of theirs, and the next fit is observed twice."""
    run_ranks(_fail_with_the_device, world_size=1)


def test_no_table_before_the_warm_up_is_over() -> None:
    raised, printed, summary, headline = interrupted(Failure(), {"num_warmup_steps": 50}, devices=1)
    assert (raised, printed, summary, headline) == ("ArithmeticError", "", {}, "")
