"""Hooks on the wrapper of a model, which a fit may make several times."""

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed import GradBucket, ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt import CommOptDDP, CommOptDiLoCo
from lightning_commopt.plan import OptionError
from support.lightnings import Callback, LightningModule, Trainer
from support.strategy_models import Params, Tiny, assert_same, loader, numbers, trainer
from support.warm_ranks import run_ranks

_HOOKED_BATCHES = 5


class Hooks(Callback):
    """Hooks the wrapper of a fit for the first batches, while a layer is unfrozen, frozen and unfrozen again."""

    def __init__(self) -> None:
        self.num_calls: Counter[str] = Counter()
        self.wrappers: set[int] = set()
        self.handles: list[Any] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.layers[0].requires_grad_(True)  # type: ignore[index]
        model = trainer.model
        assert isinstance(model, DistributedDataParallel)
        self.handles = [
            model.register_forward_pre_hook(self._count("before forward"), with_kwargs=True),
            model.register_forward_hook(self._count("after forward"), always_call=True),
            model.register_full_backward_hook(self._count("backward")),
            model.register_state_dict_post_hook(self._count("state_dict")),
        ]

    def _count(self, of: str) -> Any:
        def count(model: Any, *args: Any) -> None:
            self.num_calls[of] += 1
            self.wrappers.add(id(model))

        return count

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        number = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        pl_module.layers[0].requires_grad_(number % 4 >= 2)  # type: ignore[index]
        if number == _HOOKED_BATCHES:
            assert trainer.model is not None
            trainer.model.state_dict()
            while self.handles:
                self.handles.pop().remove()
            trainer.model.state_dict()


class FrozenAtFirst(Tiny):
    """Has a layer that is frozen when the model is wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)


class WithOwnHook(CommOptDDP):
    """Registers a hook with every wrapper."""

    num_calls = 0

    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert self.model is not None
        self.model.register_forward_hook(self._count)

    def _count(self, *args: Any) -> None:
        self.num_calls += 1


_EXPECTED = dict.fromkeys(("before forward", "after forward", "backward"), _HOOKED_BATCHES) | {"state_dict": 1}


def _fit(strategy: CommOptDDP | CommOptDiLoCo) -> tuple[dict[str, int], int, int]:
    hooks = Hooks()
    fitting = trainer(strategy, callbacks=[hooks])
    fitting.fit(FrozenAtFirst(), loader())
    return dict(hooks.num_calls), len(hooks.wrappers), fitting.fit_loop.epoch_loop.total_batch_idx + 1


def _fit_ddp() -> tuple[dict[str, int], int, int, int]:
    strategy = WithOwnHook(comm_hook="int8")
    return *_fit(strategy), strategy.num_calls


def test_users_hooks_stay_and_a_strategys_own_do_not_repeat() -> None:
    """If it fails, hooks on ``trainer.model`` are lost when parameters are frozen or plan="auto" tries a plan."""
    for num_calls, num_wrappers, num_batches, num_own_calls in run_ranks(_fit_ddp):
        assert num_calls == _EXPECTED
        assert num_wrappers > 2, "the model must have been wrapped again more than once"
        assert num_own_calls == num_batches > _HOOKED_BATCHES


def _fit_diloco() -> tuple[dict[str, int], int, int]:
    return _fit(CommOptDiLoCo(sync_every=2, outer_momentum=0.0, inner="ddp"))


def test_users_hooks_stay_within_a_worker_of_diloco() -> None:
    """If it fails, a worker of several ranks loses hooks on ``trainer.model``, or fails when parameters are frozen."""
    for num_calls, num_wrappers, _ in run_ranks(_fit_diloco):
        assert num_calls == _EXPECTED
        assert num_wrappers > 1, "the model must have been wrapped again"


class Thaw(Callback):
    """Unfreezes a layer after the fourth batch; keeps for each batch whether torch's PowerSGD has a residual."""

    def __init__(self, state: PowerSGDState) -> None:
        self.state = state
        self.has_residual: list[bool] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.has_residual.append(bool(self.state.error_dict))
        if len(self.has_residual) == 4:
            pl_module.layers[0].requires_grad_(True)  # type: ignore[index]


def _fit_torchs_powersgd() -> tuple[list[bool], list[str], Params]:
    module, thaw = FrozenAtFirst(), Thaw(PowerSGDState(None, start_powerSGD_iter=2))
    strategy = CommOptDDP(ddp_comm_state=thaw.state, ddp_comm_hook=powerSGD_hook)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(strategy, callbacks=[thaw]).fit(module, loader(48))
    return thaw.has_residual, [str(warning.message) for warning in caught], numbers(module)


def test_torchs_powersgd_begins_anew_in_other_buckets() -> None:
    """If it fails, backward raises after a layer was unfrozen, or adds residuals to other parameters' gradients."""
    (has_residual, messages, params), (_, _, params_of_peer) = run_ranks(_fit_torchs_powersgd)
    assert has_residual == [False] * 2 + [True] * 2 + [False] * 4 + [True] * 4
    assert sum("PowerSGD loses its residuals and factors" in message for message in messages) == 1
    assert_same(params_of_peer, params)


def _halve(state: ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return allreduce_hook(state, bucket).then(lambda averaged: averaged.value().mul_(0.5))


class CommHook(Callback):
    """Registers a comm hook with the wrapper, or not, and freezes a layer for the third and fourth batch."""

    def __init__(self, *, registers: bool) -> None:
        self._registers = registers

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._registers:
            assert isinstance(trainer.model, DistributedDataParallel)
            trainer.model.register_comm_hook(None, _halve)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.layers[0].requires_grad_(batch_idx not in (1, 2))  # type: ignore[index]
        if self._registers and batch_idx == 4:
            with pytest.raises(OptionError, match="with a hook that the program has registered"):
                trainer.strategy.apply_plan("bf16")  # type: ignore[attr-defined]


def _fit_with_comm_hook() -> tuple[Params, Params]:
    found = []
    for registers in (False, True):
        torch.manual_seed(0)
        module, strategy = Tiny(), CommOptDDP(ddp_comm_hook=None if registers else _halve)
        trainer(strategy, callbacks=[CommHook(registers=registers)]).fit(module, loader())
        found.append(numbers(module))
    with pytest.raises(RuntimeError, match="DDP takes one comm hook"):
        trainer(CommOptDDP(comm_hook="bf16"), callbacks=[CommHook(registers=True)]).fit(Tiny(), loader())
    return found[0], found[1]


def test_a_programs_comm_hook_stays() -> None:
    """If it fails, a comm hook that a callback has registered is gone once a layer was frozen."""
    for given, registered in run_ranks(_fit_with_comm_hook):
        assert_same(registered, given)
