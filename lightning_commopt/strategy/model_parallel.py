"""CommOptModelParallel for the Trainer of either package."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import FSDPModule

from lightning_commopt.compat.fsdp import has_own_divide_factor
from lightning_commopt.compat.loops import batch_is_open
from lightning_commopt.compressors import ShardedCompressor
from lightning_commopt.launch.nccl_options import NcclOptions
from lightning_commopt.plan import CommPlan, OptionError
from lightning_commopt.plan.base import option_errors
from lightning_commopt.plan.sharded import ShardedPlan
from lightning_commopt.strategy import base, remedies
from lightning_commopt.strategy.adapters import accelerator_property
from lightning_commopt.strategy.arguments import document_plan_options, sharded_plan_from_arguments
from lightning_commopt.strategy.fit_guards import FitGuards
from lightning_commopt.strategy.lightning_launcher import forget_previous_job
from lightning_commopt.strategy.started import StartsRanks
from lightning_commopt.sync.checkpoint import KEY, gather_state
from lightning_commopt.sync.fsdp2.checkpoint import resume, save_in_directory
from lightning_commopt.sync.fsdp2.gradients import ShardedSync, sharded_units
from lightning_commopt.sync.fsdp2.model_sync import (
    ShardedModelSync,
    gradient_bytes,
    require_sync,
    set_unit_options,
)
from lightning_commopt.sync.strategies import TrainersStrategy, trainer_of
from lightning_commopt.text.formatting import byte_unit
from lightning_commopt.text.validation import info, warn_once
from lightning_commopt.tune.auto_plan import ShardedFitPlan

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy as _ModelParallelStrategy
else:
    _ModelParallelStrategy = object


@document_plan_options
class CommOptModelParallelStrategy(StartsRanks, _ModelParallelStrategy):
    """Lightning's ``ModelParallelStrategy`` with compressed gradients, and less communication in accumulated batches.

    It takes the arguments of ``ModelParallelStrategy`` in the same order, and the keywords below. Lightning's own
    strategy reduce-scatters the gradients of every accumulated batch, and all-reduces them if there are replicas.

    Args:
        data_parallel_size: see ``ModelParallelStrategy``, as for all arguments down to ``timeout``. With a
            ``comm_hook`` all ranks are data-parallel if this and ``tensor_parallel_size`` are both "auto".
        comm_hook: see `ShardedPlan`, as for all options down to ``reduce_scatter_max_input_buffers``.
        save_comm_state: save the residuals of ``comm_hook`` in checkpoints, so that training resumes exactly; with
            another number of ranks their mean is used. A checkpoint that is a directory has a folder for them.
        uneven_batches: see `lightning_commopt.CommOptDDP`, as for all options down to ``watch``.
        plan: a `ShardedPlan`, or the path of a file with one, in place of the other options of a plan; or a `CommPlan`
            with nothing but a ``comm_hook``, since FSDP2 has none of DDP's other options; or "auto" to choose a
            ``comm_hook`` in the first steps of a fit (``docs/how_to/auto.md``).
        lossy: the compressors that ``plan="auto"`` may choose, such as ``["bf16", "int8"]``.
        **kwargs: refused; for an option of DDP the error says why it cannot apply.

    Attributes:
        sharded_sync: the gradient sync that compresses; None without a ``comm_hook``.

    Raises:
        OptionError: an option is unknown or out of range, or needs a newer torch.
    """

    _check_environment = remedies.refuse_ray
    start_method = "popen"  # Lightning has no other start method for sharded models

    def __init__(
        self,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        *,
        comm_hook: str | Mapping[str, Any] | ShardedCompressor | None = None,
        param_hook: Literal["int8"] | None = None,
        save_comm_state: bool = True,
        accumulate_grads: Literal["sharded", "unsharded"] = "sharded",
        separate_reduce_scatter_group: bool = False,
        reduce_scatter_max_input_buffers: int | None = None,
        uneven_batches: Literal["error", "drop", "pad", "allow"] = "error",
        sigterm_every_n_steps: int | None = None,
        nccl: str | dict[str, Any] | NcclOptions | None = None,
        watch: bool = True,
        plan: ShardedPlan | CommPlan | str | Path | None = None,
        lossy: str | list[Any] = "never",
        **kwargs: Any,
    ) -> None:
        own_plan, tuned, self._lightning_arguments = sharded_plan_from_arguments(dict(locals()))
        self._sync = ShardedModelSync(own_plan)
        self.auto_plan = ShardedFitPlan(self, tuned)
        self._saves_comm_state, self.uneven_batches = save_comm_state, uneven_batches
        self._nccl, self._watch = NcclOptions.from_config(nccl), watch
        self._guards = FitGuards(watch=watch, sigterm_every_n_steps=sigterm_every_n_steps)
        self._next_plan: ShardedPlan | None = None
        self._has_printed_size = self._has_accumulated = False
        forget_previous_job()
        super().__init__(**self._lightning_arguments)

    accelerator = accelerator_property

    @property
    def plan(self) -> ShardedPlan:
        """The plan in use."""
        return self._sync.plan

    @property
    def sharded_sync(self) -> ShardedSync | None:
        """The gradient sync that compresses reduce-scatters; None if FSDP2's own are used."""
        return self._sync.gradients

    def setup_environment(self) -> None:
        is_data_parallel = self.plan.is_lossy or self.auto_plan.is_wanted
        if is_data_parallel and self._data_parallel_size == self._tensor_parallel_size == "auto":
            self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()
        self._guards.start(self)
        self.auto_plan.start_fit(is_fit=base.is_fit(self))

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        assert self.model is not None
        set_unit_options(self.model, self.plan)
        if base.is_fit(self):
            self._sync.attach(self.model, ranks_per_node=self.num_processes, timeout=self._timeout)
            if self.auto_plan.is_wanted:
                self._check_units()

    def _check_units(self) -> None:
        """Raises an OptionError if the search could try no compressor, rather than fail in the middle of the fit."""
        assert self.model is not None
        if not self._sync.has_units:
            raise OptionError(
                "plan='auto': configure_model has not sharded the model, so there is no reduce-scatter to compress"
            )
        with option_errors("plan='auto': "):
            units = sharded_units(self.model)
        # A plan with a comm_hook sets the factor itself, after it has refused one that the program has set.
        if self.sharded_sync is None and any(has_own_divide_factor(module) for module, _ in units):
            raise OptionError("plan='auto': comm_hook and set_gradient_divide_factor exclude each other")

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        if self.world_size > 1:
            remedies.warn_of_rank_dependent_lbfgs(self.optimizers)

    def apply_plan(self, plan: ShardedPlan | CommPlan | str | Mapping[str, Any] | ShardedCompressor) -> None:
        """Changes the plan, also in the middle of a fit.

        All ranks must call it, with equal plans. Between two batches it takes effect at once, within a batch before the
        next one. A compressor's residual is added to the next gradients.

        Args:
            plan: the new plan; or a value of ``comm_hook`` ("int8", a compressor, ...), which replaces only that option
                of the plan in use.

        Raises:
            OptionError: ``plan`` is neither, this model cannot change to it, or the ranks' plans differ. The old plan
                stays.
        """
        if isinstance(plan, ShardedPlan | CommPlan):
            plan = ShardedPlan.of(plan)
        else:
            plan = (self._next_plan or self.plan).with_comm_hook(plan)
        plan.check_torch()
        self._sync.check_plan(plan)
        self._next_plan = plan
        if not self._is_in_batch():
            self._apply_next_plan()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._sync.end_flush()
        self._apply_next_plan()
        self.auto_plan.begin_batch(batch, batch_idx)

    def _is_in_batch(self) -> bool:
        """Returns whether a training batch has begun and not ended."""
        module = self.lightning_module
        return self._sync.model is not None and module is not None and batch_is_open(module.trainer)

    def _apply_next_plan(self) -> None:
        plan, self._next_plan = self._next_plan, None
        if plan is not None:
            if self._sync.model is not None and self.world_size > 1:
                base.check_plans_agree(plan)
            self._sync.change_plan(plan)

    @property
    def wire_bytes(self) -> int | None:
        """Payload bytes of gradients handed to reduce-scatters, which count half; None without a ``comm_hook``."""
        return self._sync.wire_bytes

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Blocks communication that accumulated gradients need only in the last batch; see ``accumulate_grads``."""
        assert self.model is not None
        sharded = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        is_unsharded = self.plan.accumulate_grads == "unsharded"
        self._has_accumulated |= bool(sharded)
        if is_unsharded and sharded and not self._has_printed_size:
            self._has_printed_size = True
            unsharded_bytes, sharded_bytes = gradient_bytes(sharded)
            unit = byte_unit(unsharded_bytes)
            info(
                "CommOptModelParallel(accumulate_grads='unsharded'): while gradients are accumulated, each rank holds"
                f" {unit.text(unsharded_bytes)} of gradients instead of {unit.text(sharded_bytes)}."
            )
        require_sync(sharded, False, unsharded=is_unsharded)
        try:
            with super().block_backward_sync():
                yield
        finally:
            require_sync(sharded, True, unsharded=is_unsharded)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        state = saved = None
        if self.sharded_sync is not None and self._saves_comm_state and "optimizer_states" in checkpoint:
            state, in_directory = self.sharded_sync.state(), self._save_distributed_checkpoint
            can_save = not (self._is_in_batch() or base.has_failed(self))
            saved = gather_state(state, self, can_save=can_save, in_directory=in_directory)
        if saved is not None:
            checkpoint[KEY] = saved
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if state is not None and saved is not None and self._save_distributed_checkpoint:
            save_in_directory(state, Path(self.broadcast(filepath)))

    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        checkpoint = super().load_checkpoint(path, *args, **kwargs)
        saved = checkpoint.pop(KEY, None)
        if self._sync.model is not None:
            resume(self._sync, saved, self, path)
        return checkpoint

    def on_exception(self, exception: BaseException) -> None:
        self._guards.fail(exception)
        super().on_exception(exception)

    def teardown(self) -> None:
        try:
            is_unsharded = self.plan.accumulate_grads == "unsharded"
            if is_unsharded and not self._has_accumulated and has_stepped(self):
                warn_once("accumulate_grads='unsharded' had no effect: no gradients were accumulated.")
            self._sync.detach()
            super().teardown()
        finally:
            self.auto_plan.end_fit()
            self._guards.close()
        self._apply_next_plan()


def has_stepped(strategy: TrainersStrategy) -> bool:
    """Returns whether a strategy's Trainer is in a fit that has made an optimizer step."""
    return base.is_fit(strategy) and trainer_of(strategy).global_step > 0
