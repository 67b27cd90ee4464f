"""Fits one after another in one process, and modules that bring a DDP of their own."""

import copy
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_wrapper, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt import CommOptDDP, CommOptDiLoCo
from lightning_commopt.callbacks import CommTimeMonitor, HangMonitor, NVTXRanges
from lightning_commopt.compressors import Layout, State
from support.lightnings import BoringModel, DDPStrategy
from support.own_compressors import Averages
from support.ranks import run_ranks
from support.strategy_models import Tiny, loader, trainer


class _HoldsAnotherDDP(BoringModel):
    """Has a part that it wraps, trains and synchronizes by itself, in the same backward."""

    def configure_optimizers(self) -> Any:
        torch.manual_seed(0)
        self._own = [DistributedDataParallel(nn.Linear(2, 2))]  # in a list: no submodule
        parameters = [*self.layer.parameters(), *self._own[0].parameters()]
        return torch.optim.SGD(parameters, lr=0.01)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self._own[0](self.layer(batch)).pow(2).mean()


def _fit_twice(comm_hook: str | None) -> list[list[np.ndarray]]:
    """Fits with one strategy object twice, then with a second Trainer and strategy, in one process."""

    def strategy() -> Any:
        return DDPStrategy() if comm_hook is None else CommOptDDP(comm_hook=comm_hook)

    fitted, trainers = [], []
    for number in range(3):
        torch.manual_seed(0)
        model = _HoldsAnotherDDP()
        monitors = [CommTimeMonitor(every_n_steps=2, save_records=False, print_summary=False)]
        if number != 1:
            trainers.append(trainer(strategy(), callbacks=monitors, max_epochs=-1, max_steps=7))
        trainers[-1].fit_loop.epoch_loop.max_steps = 14 if number == 1 else 7
        trainers[-1].fit(model)
        fitted.append([p.detach().numpy() for p in (*model.parameters(), *model._own[0].parameters())])
    return fitted


@pytest.mark.exhaustive
def test_fits_one_after_another_of_a_module_that_holds_another_ddp() -> None:
    """If it fails, a second fit in one process, or a DDP of the user's own, meets messages of the first one's hook."""
    expected = run_ranks(_fit_twice, None)
    for comm_hook in ("all_reduce", "powersgd"):
        first, second = run_ranks(_fit_twice, comm_hook)
        for fit, (mine, peers, of_ddp) in enumerate(zip(first, second, expected[0], strict=True)):
            for one, other, plain in zip(mine, peers, of_ddp, strict=True):
                np.testing.assert_array_equal(one, other, err_msg=f"{comm_hook}, fit {fit}")
                if comm_hook == "all_reduce":
                    np.testing.assert_allclose(one, plain, rtol=1e-5, atol=1e-7, err_msg=f"fit {fit}")


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
