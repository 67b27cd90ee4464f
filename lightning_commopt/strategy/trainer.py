"""A Trainer's DDPStrategy whose gradients a GradientSync synchronizes."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compat.lightning import has_trainer, optimizer_is_toggled
from lightning_commopt.compressors import Compressor
from lightning_commopt.launch.environment import launcher_pid
from lightning_commopt.launch.nccl_options import NcclOptions
from lightning_commopt.measure.observer import Observers
from lightning_commopt.plan import CommPlan
from lightning_commopt.strategy.base import (
    check_start_method,
    explain_one_rank,
    join_group,
    prepare_nccl,
    warn_of_local_decisions,
)
from lightning_commopt.strategy.lightning_launcher import configure_multirun_launcher
from lightning_commopt.sync.checkpoint import gather_state, read_state
from lightning_commopt.sync.checks import (
    check_graph_is_static,
    check_none_unfrozen,
    explain_compiled_buckets,
    explain_unused_parameters,
    warn_of_fp16_under_scaler,
)
from lightning_commopt.sync.gradient_sync import GradientSync
from lightning_commopt.sync.state import KEY
from lightning_commopt.watch.fit_watch import FitWatch

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _DDPStrategy
else:
    _DDPStrategy = object


class OwnGroupStrategy(_DDPStrategy):
    """Trains with its own number of processes, whatever ran in this process before.

    Comes before Lightning's ``DDPStrategy`` among the bases.
    """

    _watch = True

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        configure_multirun_launcher(self)

    def setup_distributed(self) -> None:
        """Joins the process group, reporting what it waits for, and refuses one of another size.

        Raises:
            MisconfigurationException: the process group has more or fewer ranks than this strategy.
        """
        with join_group(self, self.process_group_backend, watch=self._watch):
            super().setup_distributed()


class GradientSyncStrategy(OwnGroupStrategy):
    """A ``DDPStrategy`` whose gradients travel as the plan of its `GradientSync` says.

    Attributes:
        gradient_sync: what carries the gradients.
    """

    gradient_sync: GradientSync
    # Whether Lightning's own class ends the first backward of a static graph under manual optimization: 2.5 does not.
    _flushes_static_graph: ClassVar[bool]
    _save_comm_state = True
    _uneven_batches = "error"
    _nccl: NcclOptions | None = None
    _fit_watch: FitWatch | None = None
    _next_plan: CommPlan | None = None

    @property
    def plan(self) -> CommPlan:
        """How gradients travel at present."""
        return self.gradient_sync.plan

    @property
    def sync_observers(self) -> Observers:
        """Observers that are notified of every bucket."""
        return self.gradient_sync.observers

    @property
    def wire_bytes(self) -> int:
        """Payload bytes of gradients that this rank has handed to collectives since the strategy was made.

        With a compressor they are counted at the collectives; on DDP's native path and with ``ddp_comm_hook`` it
        is the size of the gradients, once for each backward that was synchronized.
        """
        return self.gradient_sync.wire_bytes

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        check_start_method(self._launcher)

    def setup_optimizers(self, trainer: Any) -> None:
        """Makes the optimizers, and warns of those that cannot be used on several ranks as they are."""
        super().setup_optimizers(trainer)
        if self.world_size > 1:
            warn_of_local_decisions(self.optimizers)

    def setup_distributed(self) -> None:
        """Sets NCCL's variables before it joins the process group."""
        prepare_nccl(self._nccl, self.process_group_backend, self.root_device)
        super().setup_distributed()

    def setup_environment(self) -> None:
        """Joins the process group, and guards a fit against ranks that do not come."""
        super().setup_environment()
        module = self.lightning_module
        is_fit = module is not None and has_trainer(module) and module.trainer.state.fn == "fit"
        if self._watch and self.world_size > 1 and is_fit:
            assert module is not None
            assert self.cluster_environment is not None
            self._fit_watch = FitWatch(
                module.trainer,
                self._uneven_batches,
                self.root_device,
                ranks_per_node=self.num_processes,
                main_address=self.cluster_environment.main_address,
                launcher_pid=launcher_pid(self._start_method),
                timeout=self._timeout or default_pg_timeout,
            )

    def configure_ddp(self) -> None:
        """Wraps the model, unless there is only one rank."""
        if self.world_size == 1:
            explain_one_rank(self.gradient_sync.unused_hook)
        else:
            super().configure_ddp()
            self._pl_static_graph_delay_done = False
        if self.lightning_module is not None:
            self.gradient_sync.resume(self.lightning_module)

    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        if self.plan.comm_hook is not None and getattr(self.precision_plugin, "scaler", None) is not None:
            warn_of_fp16_under_scaler(self.plan.comm_hook)
        self.gradient_sync.attach(self.model, timeout=self._timeout, ranks_per_node=self.num_processes)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Refuses what would train each rank by itself, and a static graph that is not static.

        Raises:
            MisconfigurationException: a parameter that DDP does not know of asks for a gradient, or several
                optimizers are toggled under ``static_graph``.
        """
        super().pre_backward(closure_loss)
        if self.gradient_sync.trainable is not None:
            check_none_unfrozen(self.gradient_sync.trainable)
            if self.plan.static_graph:
                assert self.lightning_module is not None
                check_graph_is_static(self.lightning_module)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Ends the first backward of a static graph under manual optimization, and counts the gradient sync."""
        super().post_backward(closure_loss)
        module = self.lightning_module
        is_manual = module is not None and not module.automatic_optimization
        self.gradient_sync.end_backward(ends_static_graph=is_manual and not self._flushes_static_graph)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Blocks gradient sync in backward, but for the first one of a static graph, which DDP needs."""
        if self.gradient_sync.must_sync:
            yield
        else:
            with super().block_backward_sync():
                yield

    def apply_plan(self, plan: CommPlan | str | Mapping[str, Any] | Compressor) -> None:
        """Changes how gradients travel, in the middle of a fit if need be.

        All ranks must call it, with equal plans. Called between two batches it takes effect at once; within a
        batch, before the next one. Gradients that were accumulated so far are kept. Between lossless plans training
        goes on as if nothing had happened; a compressor's residual is added to the next gradients.

        Args:
            plan: the new plan; or what ``comm_hook`` takes ("bf16", a compressor, ...), for the present plan with that
                ``comm_hook``.

        Raises:
            OptionError: ``plan`` is neither, the strategy has a ``ddp_comm_hook`` too, nodes cannot be made of the
                ranks as the plan asks, or the ranks' plans differ. The old plan stays.
        """
        if not isinstance(plan, CommPlan):
            plan = (self._next_plan or self.plan).with_comm_hook(plan)
        self.gradient_sync.check_plan(plan)
        if self._is_in_batch:
            self._next_plan = plan
        else:
            self._change_plan(plan)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Applies a plan that arrived within the last batch; wraps again where parameters were frozen or unfrozen."""
        super().on_train_batch_start(batch, batch_idx)
        if self._next_plan is not None:
            self._change_plan(self._next_plan)
        module, trainable = self.lightning_module, self.gradient_sync.trainable
        if trainable is None or module is None or optimizer_is_toggled(module):
            return
        may_be_frozen = self.plan.find_unused_parameters or not trainable.some_frozen()
        if trainable.some_unfrozen() or not may_be_frozen:
            self.gradient_sync.rewrap(self._wrap)

    def _change_plan(self, plan: CommPlan) -> None:
        self._next_plan = None
        self.gradient_sync.check_agreement(plan)
        for name in self.plan.ddp_kwargs():
            self._ddp_kwargs.pop(name, None)
        self._ddp_kwargs.update(plan.ddp_kwargs())
        self.gradient_sync.change_plan(plan, self._wrap)

    def _wrap(self, module: Module) -> None:
        self.model = module
        self.configure_ddp()

    @property
    def _is_in_batch(self) -> bool:
        """Whether a training batch has begun and not ended."""
        if self.gradient_sync.model is None:
            return False
        assert self.lightning_module is not None
        batches = self.lightning_module.trainer.fit_loop.epoch_loop.batch_progress.current
        return batches.started > batches.processed  # type: ignore[attr-defined]

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Writes a checkpoint, with the gradient-sync state of all ranks unless it is of weights only.

        If some ranks do not come, or come in the middle of a batch, because of an exception or a signal, the state is
        left out with a warning.
        """
        if self._save_comm_state and "optimizer_states" in checkpoint:
            saved = gather_state(
                self.gradient_sync.state(),
                is_in_batch=self._is_in_batch,
                world_size=self.world_size,
                timeout=self._timeout or default_pg_timeout,
                device=self.root_device,
            )
            if saved is not None:
                checkpoint[KEY] = saved
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads a checkpoint; if it is to be trained further, keeps this rank's part of the state."""
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        saved = checkpoint.pop(KEY, None)
        module = self.lightning_module
        # After a fit in spawned processes the module of the process that started them belongs to no trainer.
        if module is None or not has_trainer(module) or module.trainer.state.fn != "fit":
            return checkpoint
        self.gradient_sync.restore(read_state(saved, self.global_rank, self.world_size, self.plan.comm_hook))
        if self.gradient_sync.model is not None:  # in the middle of a fit, as the learning rate finder does
            self.gradient_sync.resume(module)
        return checkpoint

    def on_exception(self, exception: BaseException) -> None:
        """Says what to do about compiled modules and unused parameters, and lets the other ranks know."""
        explain_compiled_buckets(exception)
        explain_unused_parameters(exception)
        if self._fit_watch is not None:
            self._fit_watch.fail(exception)

    def teardown(self) -> None:
        """Removes the wrapper, and ends the hook."""
        try:
            if self._save_comm_state and not self._is_in_batch:
                self.gradient_sync.keep_state()
            self.gradient_sync.release_wrapper()  # so that Lightning can free its buckets
            super().teardown()
        finally:
            self.gradient_sync.end_fit()
            if self._fit_watch is not None:
                self._fit_watch.close()
                self._fit_watch = None
        if self._next_plan is not None:
            self._change_plan(self._next_plan)
