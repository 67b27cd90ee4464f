"""Fits one after another in one process, and modules that bring a DDP of their own."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_wrapper, fp16_compress_hook

from lightning_commopt import CommOptDDP, CommOptDiLoCo
from lightning_commopt.callbacks import CommTimeMonitor, HangMonitor, NVTXRanges
from support.lightnings import DDPStrategy
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
