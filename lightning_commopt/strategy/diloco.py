"""CommOptDiLoCo for the Trainer of either package."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed.constants import default_pg_timeout
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compat.lightning import count_samples, is_log_of_step, optimizer_is_toggled, skips_backward
from lightning_commopt.compat.loops import LoopEvents, is_last_epoch
from lightning_commopt.compressors import Compressor
from lightning_commopt.launch.nccl_options import NcclOptions
from lightning_commopt.plan import CommPlan, DiLoCoPlan
from lightning_commopt.strategy.adapters import accelerator_property
from lightning_commopt.strategy.arguments import StartMethod, diloco_plan_from_arguments, document_plan_options
from lightning_commopt.strategy.diloco_callbacks import DecidesTogether
from lightning_commopt.strategy.diloco_checkpoint import SavesRanks
from lightning_commopt.strategy.diloco_steps import CountsSteps
from lightning_commopt.strategy.diloco_workers import WorkerExchanges, keep_batch_norm_within, refuse_pruning
from lightning_commopt.strategy.fit_guards import FitGuards
from lightning_commopt.strategy.lightning_launcher import forget_previous_job
from lightning_commopt.sync.ddp.attach import preserve_buffers, select_optimized
from lightning_commopt.sync.ddp.gradient_sync import GradientSync
from lightning_commopt.sync.diloco.drift import DriftWatch
from lightning_commopt.sync.diloco.equalize import equalize, tensors_of
from lightning_commopt.sync.diloco.outer import MEAN_OF_WEIGHTS, warn_of_short_fit
from lightning_commopt.sync.diloco.rounds import Rounds
from lightning_commopt.sync.strategies import trainer_of
from lightning_commopt.text.validation import warn_once

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


@document_plan_options
class CommOptDiLoCoStrategy(WorkerExchanges, SavesRanks, CountsSteps, DecidesTogether):
    """Trains every rank, or every node, by itself, and exchanges what it has learned every ``sync_every`` steps.

    It takes the arguments of ``DDPStrategy`` up to ``start_method``, and the keywords below. Gradients are not
    averaged, except within a node with ``inner``. Between two exchanges a step has no collective: values that
    ``training_step`` logs per step with ``sync_dist=True`` are this rank's; those per epoch are reduced. A fit ends
    with an exchange of what was trained since the last one.

    Args:
        accelerator: see ``DDPStrategy``, as for all arguments down to ``start_method``.
        sync_every: see `DiLoCoPlan`, as for all options down to ``inner``.
        save_comm_state: save in checkpoints what each rank needs to resume exactly, in a file of its own.
        uneven_batches: see `lightning_commopt.CommOptDDP`, as for all options down to ``watch``.
        patience_s: seconds that ranks wait for another one in an exchange, and that a message may take. After that the
            exchange is repeated among the ranks that have arrived, weighted by samples; nothing of the failed exchange
            is applied. A rank that arrives later, if it is the same process, drops what it has trained since and joins
            again from the global weights. Where Lightning makes all ranks wait for each other, as at the end of an
            epoch, they wait only for ranks that have shown a sign of life within ``patience_s``. The fit continues
            without a rank that has died, unless its process hosts the store of the process group: torchrun's agent, or
            without torchrun rank 0. With None only ``timeout`` limits the wait, and then the fit ends with an error.
        plan: a `DiLoCoPlan`, or the path of a file with one, in place of the other options of a plan.
        **kwargs: refused, with an error that says where an option of DDP belongs, which is ``inner``.

    Attributes:
        rounds: the exchanges of the fit; None outside of one.

    Raises:
        OptionError: an option is unknown or out of range.
    """

    _shows_global_for_validation = False

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
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
        eval_weights: Literal["global", "local"] = "global",
        inner: str | dict[str, Any] | CommPlan | None = None,
        save_comm_state: bool = True,
        uneven_batches: Literal["error", "drop", "pad"] = "error",
        sigterm_every_n_steps: int | None = None,
        nccl: str | dict[str, Any] | NcclOptions | None = None,
        watch: bool = True,
        patience_s: float | None = None,
        plan: DiLoCoPlan | str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        self._plan, self._lightning_arguments = diloco_plan_from_arguments(dict(locals()))
        self.rounds: Rounds | None = None
        self._inner = GradientSync(self._plan.inner or CommPlan())
        self._events: LoopEvents | None = None
        self._saves_comm_state, self.uneven_batches = save_comm_state, uneven_batches
        self._nccl, self._watch = NcclOptions.from_config(nccl), watch
        self._patience_s = patience_s
        self._guards = FitGuards(
            watch=watch, sigterm_every_n_steps=sigterm_every_n_steps, default_every_n_steps=self._plan.sync_every
        )
        forget_previous_job()
        super().__init__(**self._lightning_arguments, **self._inner.plan.ddp_kwargs())

    accelerator = accelerator_property

    @property
    def plan(self) -> DiLoCoPlan:
        """The plan in use."""
        return self._plan

    @property
    def wire_bytes(self) -> int:
        """Payload bytes that this rank has sent in exchanges of this fit; between fits, of the last one."""
        return self._wire_bytes_of_ended_fit if self.rounds is None else self.rounds.exchange.bytes_sent

    _wire_bytes_of_ended_fit = 0

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        self._inner.note_set_up()

    def configure_ddp(self) -> None:
        """Makes all ranks' weights equal, begins the rounds, and wraps the model if a node is one worker."""
        module = self.lightning_module
        assert module is not None
        refuse_pruning(trainer_of(self))
        tensors = tensors_of(module)
        if self.world_size > 1:
            equalize(tensors)
        self._drift_watch = DriftWatch(self.num_processes if self._is_inner else 1)
        self._shows_global_for_validation = False  # an exception may have ended a validation
        self._events = LoopEvents(
            trainer_of(self),
            on_epoch_end=self._finish_if_last,
            on_validation=self._show_global_for_validation,
            on_end=self._finish,
        )
        self._wrap_callbacks()
        if self.world_size > 1 and self._patience_s is not None:
            # It follows the LoopEvents so that all ranks wait for each other before the exchange at the end of the fit.
            self._let_ranks_fail()
        self._begin_rounds(self._make_exchange())
        within = self._node_group()
        keep_batch_norm_within(module, within)
        if within is not None:
            self._ddp_kwargs["process_group"] = within
            with preserve_buffers(module):  # a checkpoint may have restored buffers that are each rank's own
                super().configure_ddp()
            self._inner.resume(module)

    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        self._inner.attach(self.model, timeout=self._timeout, ranks_per_node=self.num_processes)

    def on_train_start(self) -> None:
        super().on_train_start()
        self._adopt_weights_of_hooks()
        warn_of_short_fit(trainer_of(self), self._plan, MEAN_OF_WEIGHTS)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._adopt_weights_of_hooks()  # hooks of the first epoch and batch may have set weights, too
        assert self.rounds is not None
        self.rounds.show_own()
        self.rounds.expect_changes()
        self._is_first_batch, self._has_stepped = batch_idx == 0, False
        self._include_unfrozen(self.rounds)
        self.rounds.counts.samples += count_samples(batch) or 1

    def _include_unfrozen(self, rounds: Rounds) -> None:
        module = self.lightning_module
        assert module is not None
        if self._is_first_batch:
            rounds.find_added(module)
        if optimizer_is_toggled(module):
            return
        if unfrozen := select_optimized(rounds.left_out.unfrozen().values(), self.optimizers):
            self._equalize(
                unfrozen
            )  # an earlier training step may have unfrozen and trained them, on each rank by itself
            rounds.divide_again(module)
        # Parameters may have been frozen, too.
        if self._inner.must_rewrap(self.optimizers, is_first_batch=self._is_first_batch):
            self._inner.rewrap(self._wrap)

    def _wrap(self, module: Module) -> None:
        self.model = module
        super().configure_ddp()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a value over the ranks, except what ``self.log`` reduces per step, for which no rank should wait."""
        caller = sys._getframe(1).f_globals["__name__"]
        if group is None and self.rounds is not None and is_log_of_step(trainer_of(self), caller):
            return tensor
        return super().reduce(tensor, group, reduce_op)

    def _show_global_for_validation(self) -> None:
        """Puts the global weights into the module, before callbacks swap in others until ``on_validation_end``."""
        if self.rounds is not None and self.rounds.shows_own and self._plan.eval_weights == "global":
            self.rounds.show_global()
            self._shows_global_for_validation = True

    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self._shows_global_for_validation and self.rounds is not None:
            self.rounds.show_own()
            if isinstance(self.model, DistributedDataParallel):
                # DDP has broadcast the global buffers in validation, and would therefore skip its next broadcast, which
                # must send the node's own buffers.
                self.model.require_forward_param_sync = True
        self._shows_global_for_validation = False

    def _finish_if_last(self) -> None:
        if is_last_epoch(trainer_of(self)):
            self._finish()

    def on_train_end(self) -> None:
        if self.rounds is not None and self.lightning_module is not None:
            self.rounds.finish_again()
            self.rounds.find_added(self.lightning_module)
            # Hooks may have changed what is in no fragment, and replaced parameters on some ranks only.
            self._equalize([*self.lightning_module.parameters()])
        super().on_train_end()

    def _finish(self) -> None:
        if self.rounds is not None and self.rounds.shows_own:
            self.rounds.finish(mixes=not skips_backward(trainer_of(self)))
            if self.rounds.counts.samples and not self.rounds.num_steps:
                warn_once(
                    "DiLoCo: no step of the first optimizer was counted, so workers exchanged nothing before the end of"
                    " the fit. Call step() of the optimizers that self.optimizers() returns."
                )

    def teardown(self) -> None:
        try:
            self._unwrap_callbacks()
            if self._events is not None:
                self._events.close()
            if self.rounds is not None:
                if self.rounds.close() and self._groups is not None:
                    self._groups.return_to_pool()
                if self.rounds.shows_own:  # an exception has ended the fit
                    self.rounds.show_global()
                self._keep_rounds_for_checkpoints(self.rounds)
                self._wire_bytes_of_ended_fit = self.rounds.exchange.bytes_sent
            self._inner.release_wrapper()
            super().teardown()
        finally:
            self._inner.end_fit()
            if self._living is not None:
                self._living.wait_for_readers()
            self._guards.close()
            self.rounds = self._groups = self._events = None
