"""OuterMomentum: the outer optimizer of DiLoCo, for any strategy, without communication."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_commopt.compat.fsdp import units_of
from lightning_commopt.compat.lightning import Callback, MisconfigurationException, skips_backward
from lightning_commopt.compat.torch import add_step_hook
from lightning_commopt.plan import DiLoCoPlan, OptionError
from lightning_commopt.strategy.base import plan_of
from lightning_commopt.sync.diloco.outer import OuterSGD, warn_of_short_fit

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_REFUSED = {
    "DeepSpeedStrategy": "its optimizer keeps weights of its own, and would overwrite the outer step",
    "FSDPStrategy": "FSDP1 flattens the parameters; use ModelParallelStrategy or CommOptModelParallel, with FSDP2",
}


class OuterMomentum(Callback):
    """Moves the weights every ``sync_every`` optimizer steps, with momentum over the changes that these steps made.

    It is DiLoCo with one worker, which consists of all ranks of DDP or FSDP2. Nothing is sent, because every rank moves
    the weights that it holds. The slow weights and their momentum take the memory of two further copies of the
    trainable parameters (with FSDP2, of this rank's shards), in float32 if the parameters have 16 bits.

    Only steps of the first optimizer count, and with "16-mixed" no step that the gradient scaler skips. The weights
    move at the end of the batch. Validation, checkpoints and the end of a fit see the weights as they are in training,
    also between two moves. A parameter that is frozen meanwhile is not moved; one that is unfrozen takes part after the
    next move. Checkpoints contain the callback's state, so that training resumes exactly.

    Source: Douillard et al., "DiLoCo" (arXiv:2311.08105); with one worker "Smoothing DiLoCo with Primal Averaging"
    (arXiv:2512.17131).

    Args:
        sync_every: number of optimizer steps between two moves.
        outer_lr: learning rate of the outer optimizer; 1 without momentum changes nothing.
        outer_momentum: momentum of the outer optimizer, from 0 to below 1. The default is smaller than the papers' 0.9,
            with which a small GPT trained worse than without the callback; see ``docs/evidence/diloco.md``.
        nesterov: whether to use Nesterov momentum.

    Raises:
        OptionError: a value is out of range; or, when a fit begins, the strategy is `CommOptDiLoCo`, which has an outer
            optimizer, or one whose weights cannot be moved, or would save FSDP2's shards in a distributed checkpoint.
    """

    def __init__(
        self, *, sync_every: int = 30, outer_lr: float = 0.7, outer_momentum: float = 0.7, nesterov: bool = True
    ) -> None:
        self._options = DiLoCoPlan(
            sync_every=sync_every, outer_lr=outer_lr, outer_momentum=outer_momentum, nesterov=nesterov
        )
        self._outer = OuterSGD(lr=outer_lr, momentum=outer_momentum, nesterov=self._options.nesterov)
        self._slow: dict[str, Tensor] = {}
        self._momenta: dict[str, Tensor] = {}
        self._num_steps = 0  # optimizer steps since the last move
        self._resumed: dict[str, Any] | None = None
        self._handle: RemovableHandle | None = None
        self._is_distributed = False  # whether each rank saves its own shards in checkpoints

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        # Lightning loads this fit's state later. A state that it has loaded before, such as for a test, may be that of
        # another model.
        self._resumed = None
        strategy = trainer.strategy
        if isinstance(plan_of(strategy), DiLoCoPlan):
            raise OptionError(
                "OuterMomentum and CommOptDiLoCo exclude each other: CommOptDiLoCo has an outer optimizer of its own"
            )
        for cls in type(strategy).__mro__:
            if reason := _REFUSED.get(cls.__name__):
                raise OptionError(f"OuterMomentum does not work with {cls.__name__}: {reason}")
        self._is_distributed = getattr(strategy, "_save_distributed_checkpoint", False)
        if trainer.checkpoint_callbacks:
            self._check_saving()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()
        self._num_steps, self._slow, self._momenta = 0, {}, {}
        warn_of_short_fit(trainer, self._options, "without OuterMomentum")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begins the first round in the first batch, since hooks may set weights until then, which is not training."""
        if self._handle is None:
            self._begin_round(pl_module)
            if self._resumed is not None:
                self._resume(self._resumed)
                self._resumed = None
            self._handle = add_step_hook(trainer.optimizers[0], self._count)
            if self._handle is None:
                name = type(trainer.optimizers[0]).__name__
                raise MisconfigurationException(
                    f"OuterMomentum cannot count the steps of {name}, which has no hooks of torch.optim.Optimizer."
                )

    def _resume(self, saved: dict[str, Any]) -> None:
        self._num_steps = saved["num_steps"]
        slow, momenta = (
            {name: _distribute_like(own[name], value) for name, value in values.items() if name in own}
            for own, values in ((self._slow, saved["slow"]), (self._momenta, saved["momenta"]))
        )
        # Parameters that were not trained when the round began take part after the next move, as they would have
        # without an interruption.
        self._momenta = {name: momenta.get(name, self._momenta[name]) for name in slow if name in self._momenta}
        self._slow = slow

    def _count(self, *args: Any) -> None:
        self._num_steps += 1

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Moves the weights if a move is due. It waits for the batch's end, as training steps may freeze parameters."""
        if self._num_steps >= self._options.sync_every and not skips_backward(trainer):
            self._num_steps %= self._options.sync_every
            self._move(pl_module)

    @torch.no_grad()
    def _move(self, module: LightningModule) -> None:
        for name, parameter in _trained(module):
            if (slow := self._slow.get(name)) is not None:
                slow.add_(self._outer.update(self._momenta.get(name), slow - parameter), alpha=-self._outer.lr)
                parameter.copy_(slow)
        self._begin_round(module)

    def _begin_round(self, module: LightningModule) -> None:
        """Adds parameters that are trained since the last move, and drops those that are no longer trained."""
        trained = dict(_trained(module))
        for name in self._slow.keys() - trained.keys():
            del self._slow[name]
            self._momenta.pop(name, None)
        for name, parameter in trained.items():
            if name not in self._slow:
                dtype = torch.promote_types(parameter.dtype, torch.float32)
                slow = self._slow[name] = parameter.detach().to(dtype, copy=True)
                if self._outer.momentum:
                    self._momenta[name] = torch.zeros_like(slow)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of all ranks together, on CPU. All ranks must call it."""
        self._check_saving()
        if self._resumed is not None:  # no batch has been trained since it was loaded
            return self._resumed
        slow, momenta = ({name: _gather_to_cpu(x) for name, x in own.items()} for own in (self._slow, self._momenta))
        return {"num_steps": self._num_steps, "slow": slow, "momenta": momenta}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict if state_dict["slow"] else None  # empty if it was saved before the first batch

    def _check_saving(self) -> None:
        if self._is_distributed:
            raise OptionError(
                "OuterMomentum cannot save its state in a distributed checkpoint, which contains only the callbacks of"
                " rank 0: use save_distributed_checkpoint=False"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def _trained(module: LightningModule) -> Iterator[tuple[str, Tensor]]:
    for unit in units_of(module):
        unit.reshard()  # a forward without a backward, as in validation, leaves the root's parameters gathered
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)


def _gather_to_cpu(tensor: Tensor) -> Tensor:
    """Returns a tensor on CPU, gathered from all ranks if it is sharded."""
    gather = getattr(tensor, "full_tensor", None)
    return (tensor if gather is None else gather()).to("cpu", copy=True)


def _distribute_like(own: Tensor, whole: Tensor) -> Tensor:
    """Returns a copy of a whole tensor on the device of ``own``, and sharded like it."""
    whole = whole.to(own.device, own.dtype, copy=True)
    if not hasattr(own, "full_tensor"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, own.device_mesh, own.placements)  # type: ignore[attr-defined]
