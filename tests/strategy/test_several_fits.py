"""Fits one after another in one process, and modules that bring a DDP of their own."""

import copy
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_wrapper, fp16_compress_hook

from lightning_commopt import CommOptDDP, CommOptDiLoCo
from lightning_commopt.callbacks import CommTimeMonitor, HangMonitor, NVTXRanges
from lightning_commopt.compressors import Layout, State
from support.lightnings import BoringModel, DDPStrategy
from support.own_compressors import Averages
from support.strategy_models import Tiny, loader, trainer
from support.warm_ranks import run_ranks


def _copy_after_a_fit(make: Callable[[], Any]) -> list[str]:
    monitor = CommTimeMonitor(every_n_steps=2, save_records=False, print_summary=False)
    used = [make(), monitor, HangMonitor(), NVTXRanges()]
    trainer(used[0], callbacks=used[1:], max_epochs=-1, max_steps=4).fit(Tiny(), loader())
    copies = [*pickle.loads(pickle.dumps(used)), *copy.deepcopy(used)]
    return [type(one).__name__ for one in copies]


@pytest.mark.parametrize(
    "make",
    [
        partial(CommOptDDP, comm_hook="bf16"),
        partial(CommOptDiLoCo, sync_every=2),
        partial(DDPStrategy, ddp_comm_hook=fp16_compress_hook, ddp_comm_wrapper=bf16_compress_wrapper),
    ],
    ids=["CommOptDDP", "CommOptDiLoCo", "DDPStrategy"],
)
def test_what_has_been_used_can_be_copied(make: partial[Any]) -> None:
    """If it fails, programs that save their Trainer's settings after a fit, as Darts does, raise at their end."""
    used = [make.func.__name__, "CommTimeMonitor", "HangMonitor", "NVTXRanges"]
    assert run_ranks(_copy_after_a_fit, make) == [[*used, *used]] * 2


@dataclass(frozen=True, kw_only=True)
class _KeepsAnObject(Averages):
    """Has a state that no checkpoint can hold."""

    def init(self, layout: Layout, device: torch.device, step: int = 0) -> State:
        return {"anything": object()}


def _end_with_a_state_that_cannot_be_kept() -> tuple[str, int, int]:
    strategy = CommOptDDP(comm_hook=_KeepsAnObject())
    try:
        trainer(strategy, max_epochs=-1, max_steps=2).fit(BoringModel())
    except TypeError as error:
        threads = sum(thread.name == "commopt-gradient-sync" for thread in threading.enumerate())
        return str(error), threads, strategy.gradient_sync.num_syncs
    return "", -1, -1


def test_a_state_that_cannot_be_kept_leaves_no_hook() -> None:
    """If it fails, an error at the end of a fit leaves a thread, and the next fit begins where this one was."""
    for message, num_threads, num_syncs in run_ranks(_end_with_a_state_that_cannot_be_kept):
        assert "a state may hold tensors" in message
        assert (num_threads, num_syncs) == (0, 0)
