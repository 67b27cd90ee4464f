"""CommOptDiLoCo for Lightning Fabric."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.plugins.precision import Precision
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_commopt.compat.lightning import MisconfigurationException
from lightning_commopt.compressors import Compressor
from lightning_commopt.launch.nccl_options import NcclOptions
from lightning_commopt.measure.observer import Observers
from lightning_commopt.plan import DiLoCoPlan, OptionError
from lightning_commopt.strategy.arguments import StartMethod, diloco_plan_from_arguments, document_plan_options
from lightning_commopt.strategy.diloco_workers import (
    exchange_alone,
    exchange_of_all_ranks,
    keep_batch_norm_within,
    placed_compressor,
    refuse_shared_optimizers,
)
from lightning_commopt.strategy.fabric_diloco_checkpoint import SavesRanksOfFabric
from lightning_commopt.strategy.fabric_diloco_unfinished import Unfinished
from lightning_commopt.strategy.lightning_launcher import forget_previous_job
from lightning_commopt.strategy.loss_scale import agree_on_loss_scale, loss_scale
from lightning_commopt.strategy.remedies import explain_changed_weights, repr_for_trainer
from lightning_commopt.sync.diloco.checkpoint import Saved
from lightning_commopt.sync.diloco.drift import DriftWatch
from lightning_commopt.sync.diloco.equalize import equalize
from lightning_commopt.sync.diloco.exchange import Exchange
from lightning_commopt.sync.diloco.outer import MEAN_OF_WEIGHTS, warn_of_few_steps
from lightning_commopt.sync.diloco.rounds import Rounds
from lightning_commopt.text.validation import warn_once

_TRAINER_OPTIONS = {
    "eval_weights": "strategy.global_weights() shows the global weights to a validation",
    "inner": "each rank is a worker of its own",
    "patience_s": "all ranks must take part in each exchange",
    "sigterm_every_n_steps": "your loop decides what a signal does",
    "uneven_batches": "your loop must take the same number of steps on all ranks",
}
"""Options of the Trainer's `CommOptDiLoCo` that Fabric's refuses, each with the reason or what replaces it."""


@document_plan_options
class CommOptDiLoCo(SavesRanksOfFabric):
    """Trains every rank by itself, and exchanges what it has learned every ``sync_every`` steps.

    The options are those of `lightning_commopt.CommOptDiLoCo`, except ``eval_weights``, ``inner`` and those that only a
    Trainer can apply. One module can be trained at a time. ``fabric.setup`` returns it without DDP's wrapper, with
    equal weights on all ranks. Only steps of the optimizer that was set up first count, and all ranks have equal weight
    in the mean.

    Args:
        accelerator: see ``DDPStrategy``, as for all arguments down to ``start_method``.
        sync_every: see `DiLoCoPlan`, as for all options down to ``nesterov``.
        save_comm_state: save in checkpoints that hold an optimizer what each rank needs to resume exactly, in a file of
            its own.
        nccl: see `lightning_commopt.CommOptDDP`.
        watch: report what the process group waits for while it is created, and end a rank that waits for ranks which
            cannot join any more.
        plan: a `DiLoCoPlan`, or the path of a file with one, in place of the other options of a plan.
        **kwargs: refused; for an option of DDP or of a Trainer's strategy the error says why it cannot apply.

    Attributes:
        rounds: the exchanges of the module that is trained; None before there is one.
        sync_observers: observers that are notified of exchanges.

    Raises:
        OptionError: an option is unknown or out of range, or cannot apply in Fabric.
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: StartMethod = "popen",
        *,
        sync_every: int = 30,
        fragments: int = 1,
        fragment_by: Literal["blocks", "bytes"] = "blocks",
        overlap: int = 0,
        mixing: float | None = None,
        comm_hook: str | dict[str, Any] | Compressor | None = None,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        save_comm_state: bool = True,
        nccl: str | dict[str, Any] | NcclOptions | None = None,
        watch: bool = True,
        plan: DiLoCoPlan | str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        _refuse_trainer_options(kwargs)
        self._plan, lightning_arguments = diloco_plan_from_arguments(dict(locals()))
        # A plan may come from a file that was written for a Trainer.
        _refuse_trainer_options({name: x for name, x in vars(self._plan).items() if x != getattr(DiLoCoPlan, name)})
        self._saves_comm_state, self._watch, self._nccl = save_comm_state, watch, NcclOptions.from_config(nccl)
        self.sync_observers, self._drift_watch = Observers(), DriftWatch()
        self._exchange: Exchange | None = None
        self._counted_optimizer: Optimizer | None = None
        forget_previous_job()
        super().__init__(**lightning_arguments)
        self._backward_sync_control: Any = _NoBackwardSyncControl()

    @property
    def plan(self) -> DiLoCoPlan:
        """The plan in use."""
        return self._plan

    @property
    def wire_bytes(self) -> int:
        """Payload bytes that this rank has sent in exchanges since the strategy was made."""
        return 0 if self._exchange is None else self._exchange.bytes_sent

    __repr__ = repr_for_trainer

    def setup_module(self, module: Module) -> Module:  # type: ignore[override]
        """Makes a module's weights equal on all ranks, and begins its rounds if it has parameters to train."""
        if not any(x.requires_grad for x in module.parameters()):
            self._equalize([*module.parameters(), *module.buffers()])
            return module
        if self.rounds is not None and self._module is not module and not self.rounds.shows_final:
            raise MisconfigurationException(
                "CommOptDiLoCo trains one module at a time, and another one is in training: set up one module that"
                " contains all others, freeze those that are not trained (requires_grad_(False)), or call"
                " strategy.finish() before the next training"
            )
        keep_batch_norm_within(module, None)
        pending, self._pending_restore, self._module = self._pending_restore, None, module
        self._begin(pending[1] if pending is not None and pending[0] is module else Saved())
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        refuse_shared_optimizers([optimizer], {self.global_rank})
        if self._counted_optimizer is None:
            self._counted_optimizer = optimizer
        return super().setup_optimizer(optimizer)

    def _equalize(self, tensors: Sequence[Tensor]) -> None:
        if self.world_size > 1:
            equalize(tensors)

    def _begin(self, saved: Saved) -> None:
        assert self._module is not None
        if self.rounds is not None:
            self.rounds.wait()
            self.rounds.close()
        if self._exchange is None:
            if self.world_size == 1:
                self._exchange = exchange_alone(self._plan)
            else:  # the groups stay with the exchange, since there may be another training
                self._exchange, _ = exchange_of_all_ranks(*placed_compressor(self._plan, self), self)
        self._equalize([*self._module.parameters(), *self._module.buffers()])
        self.rounds = Rounds(self._plan, self._module, self._exchange, saved.trained, self.sync_observers)
        saved.restore(self.rounds)

    def backward(self, tensor: Tensor, module: Module | None, *args: Any, **kwargs: Any) -> None:
        with explain_changed_weights():
            super().backward(tensor, module, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Steps an optimizer; after a step that counts, exchanges may begin, or be applied to the module."""
        if self.rounds is None:
            return super().optimizer_step(optimizer, **kwargs)
        rounds = self._prepare_step(self.rounds)
        output = super().optimizer_step(optimizer, **kwargs)
        if self._counted_optimizer is None:
            self._counted_optimizer = optimizer
        if optimizer is not self._counted_optimizer:
            rounds.expect_changes()
            return output
        rounds.counts.samples += 1
        for index, arrived in rounds.step(partial(loss_scale, self.precision)):
            agree_on_loss_scale(self.precision, [report.loss_scale for report in arrived.reports])
            self._drift_watch.metrics(index, arrived.reports)
        self._unfinished = self._unfinished or Unfinished(self)
        self._unfinished.note_step(rounds)
        return output

    def _prepare_step(self, rounds: Rounds) -> Rounds:
        """Returns the rounds that a step belongs to, which include all trainable parameters as before the step."""
        assert self._module is not None
        if not (rounds.shows_own or rounds.shows_final):
            raise MisconfigurationException(
                "An optimizer steps within strategy.global_weights(), at whose end all changes to weights are dropped:"
                " step outside of that context."
            )
        is_first = not rounds.num_steps and not rounds.changed
        if rounds.shows_final or (is_first and rounds.exchange.any_rank(rounds.has_other_weights())):
            self._begin(Saved())  # the last training has ended, or weights were loaded since `setup_module`
        assert self.rounds is not None
        if unfrozen := self.rounds.left_out.unfrozen():
            self._equalize([*unfrozen.values()])
            self.rounds.divide_again(self._module)
        return self.rounds

    @contextmanager
    def global_weights(self) -> Generator[None, None, None]:
        """Returns a context in which the module has the global weights of the last exchanges, for validation.

        At its end this rank's own weights return, and changes to the global weights are dropped. It sends nothing.
        After `finish` the module has the global weights anyway.
        """
        rounds = self.rounds
        if rounds is None or not rounds.shows_own:
            yield
            return
        rounds.show_global()
        try:
            yield
        finally:
            if not rounds.shows_final:
                rounds.show_own()

    def finish(self) -> None:
        """Ends a training: exchanges what was trained last, and gives the module the global weights.

        All ranks must call it. Steps after it begin another training from these weights, with a new outer momentum.

        Raises:
            UnequalStepsError: ranks have taken different numbers of steps, so that their exchanges differ.
        """
        rounds = self.rounds
        if rounds is None or not rounds.num_steps:
            warn_once(
                "DiLoCo: no step was counted before finish(), so workers have exchanged nothing. Call step() of the"
                " optimizer that fabric.setup has returned."
            )
        if rounds is None or rounds.shows_final:
            return
        if rounds.num_steps:
            warn_of_few_steps(rounds.num_steps, self._plan, MEAN_OF_WEIGHTS)
        rounds.finish()
        self._equalize([*rounds.left_out.parameters.values()])  # the loop may have changed them, on each rank by itself
        rounds.to_host()
        rounds.close()
        self._counted_optimizer = None
        if self._unfinished is not None:
            self._unfinished.note_kept()


class _NoBackwardSyncControl:
    """Makes ``fabric.no_backward_sync`` do nothing, since no backward synchronizes gradients."""

    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        return nullcontext()


def _refuse_trainer_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if name in _TRAINER_OPTIONS:
            raise OptionError(f"{name}={options[name]!r} cannot apply in Fabric: {_TRAINER_OPTIONS[name]}")
