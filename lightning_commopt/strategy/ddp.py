"""CommOptDDP for the Trainer of either package."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compat.lightning import optimizer_is_toggled
from lightning_commopt.compat.loops import batch_is_open
from lightning_commopt.compressors import Compressor
from lightning_commopt.launch.nccl_options import NcclOptions
from lightning_commopt.measure.observer import Observers
from lightning_commopt.plan import CommPlan
from lightning_commopt.strategy import base, remedies
from lightning_commopt.strategy.adapters import accelerator_property
from lightning_commopt.strategy.arguments import StartMethod, document_plan_options, plan_from_arguments
from lightning_commopt.strategy.fit_guards import FitGuards
from lightning_commopt.strategy.lightning_launcher import forget_previous_job
from lightning_commopt.strategy.started import StartedAsDDP
from lightning_commopt.sync.checkpoint import KEY, gather_state, read_state
from lightning_commopt.sync.ddp.gradient_sync import GradientSync
from lightning_commopt.sync.ddp.manual_backward import ManualBackwardCheck
from lightning_commopt.sync.ddp.observed import TorchHook
from lightning_commopt.tune.auto_plan import FitPlan

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


@document_plan_options
class CommOptStrategy(base.WrapsInDDP, StartedAsDDP):
    """Lightning's ``DDPStrategy`` with all options of gradient sync, and with compressors.

    It takes the arguments of ``DDPStrategy`` in the same order, so that it can replace it in any project, and the
    keywords below. An option that is None has DDP's own default. With one process there is no wrapper and no hook.

    Args:
        accelerator: see ``DDPStrategy``, as for all arguments down to ``start_method``.
        ddp_comm_hook: one of torch's hooks, or any callable that DDP takes. It is registered on CPU too.
        static_graph: see `CommPlan`, as for all options down to ``lazy_bucket_allocation``.
        save_comm_state: save in checkpoints, for all ranks, what ``comm_hook`` needs to resume exactly: with error
            feedback 4 bytes per parameter and rank. This and the options below are not part of the plan.
        uneven_batches: what to do if ranks have different numbers of training batches, which makes DDP hang: "error" to
            raise; "drop" to end epochs after the smallest number; "pad" to repeat batches up to the largest; "allow" to
            compare nothing, for training in which ranks need not step together. "drop" and "pad" need dataloaders with
            a length.
        sigterm_every_n_steps: let the ranks agree on SIGTERM, and end together, before every n-th optimizer step and at
            the end of an epoch. With None they agree before every batch, by the broadcast that Lightning 2.5.2 and
            later make there.
        nccl: settings of NCCL: the name of a profile ("debug", "pcie", "ethernet", "infiniband"), or a mapping such as
            ``{"algo": "Ring", "min_nchannels": 16}``; see `NcclOptions`. Variables of the environment take precedence.
        watch: report which ranks a process group or an epoch waits for, compare the ranks' numbers of batches, and end
            a rank that waits for ranks which cannot come any more; see ``docs/troubleshoot/errors.md``. With False none
            of this is done, as in ``DDPStrategy``.
        plan: "auto" to choose buckets and compressors in the first steps of a fit (``docs/how_to/auto.md``); or a
            `CommPlan` or the path of a file with one, in place of the other options of a plan.
        lossy: "never", or the compressors that ``plan="auto"`` may choose, such as ``["bf16", "int8"]``.
        **kwargs: further arguments of ``DistributedDataParallel``.

    Attributes:
        gradient_sync: the `GradientSync` that synchronizes the gradients.
        plan: the `CommPlan` with the options of a plan.

    Raises:
        OptionError: an option is unknown or out of range, contradicts another one, or is missing in the installed
            torch. It is both a ``ValueError`` and Lightning's ``MisconfigurationException``.
    """

    # Whether Lightning's DDPStrategy finishes the first backward of a static graph under manual optimization. Lightning
    # 2.5 does not.
    _flushes_static_graph: ClassVar[bool]

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: StartMethod = "popen",
        *,
        static_graph: bool | None = None,
        gradient_as_bucket_view: bool | None = None,
        bucket_cap_mb: float | list[float] | None = None,
        find_unused_parameters: bool | None = None,
        comm_hook: str | dict[str, Any] | Compressor | None = None,
        broadcast_buffers: bool | None = None,
        forward_sync_buffers: bool | None = None,
        init_sync: bool | None = None,
        skip_all_reduce_unused_params: bool | None = None,
        batched_grad_copy: bool | None = None,
        lazy_bucket_allocation: bool | None = None,
        save_comm_state: bool = True,
        uneven_batches: Literal["error", "drop", "pad", "allow"] = "error",
        sigterm_every_n_steps: int | None = None,
        nccl: str | dict[str, Any] | NcclOptions | None = None,
        watch: bool = True,
        plan: CommPlan | str | Path | None = None,
        lossy: str | list[Any] = "never",
        **kwargs: Any,
    ) -> None:
        plan_given, tuned, self._lightning_arguments = plan_from_arguments(dict(locals()))
        torch_hook = None if ddp_comm_hook is None else TorchHook(ddp_comm_hook, ddp_comm_state, ddp_comm_wrapper)
        self.gradient_sync = GradientSync(plan_given, torch_hook)
        self.auto_plan = FitPlan(self, tuned)
        self._nccl, self._watch = NcclOptions.from_config(nccl), watch
        self._save_comm_state, self.uneven_batches = save_comm_state, uneven_batches
        self._guards = FitGuards(watch=watch, sigterm_every_n_steps=sigterm_every_n_steps)
        self._manual_backward_check = ManualBackwardCheck(None, None, ())
        self._next_plan: CommPlan | None = None
        forget_previous_job()
        super().__init__(**self._lightning_arguments)

    accelerator = accelerator_property

    @property
    def plan(self) -> CommPlan:
        """The plan in use."""
        return self.gradient_sync.plan

    @property
    def sync_observers(self) -> Observers:
        """Observers that are notified of every bucket."""
        return self.gradient_sync.observers

    @property
    def wire_bytes(self) -> int:
        """Payload bytes of gradients that this rank has sent since the strategy was made; see `GradientSync`."""
        return self.gradient_sync.wire_bytes

    def setup_environment(self) -> None:
        super().setup_environment()
        self.auto_plan.start_fit(is_fit=base.is_fit(self))

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        self.gradient_sync.note_set_up()

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        if self.world_size > 1:
            remedies.warn_of_rank_dependent_lbfgs(self.optimizers)

    def configure_ddp(self) -> None:
        """Wraps the model, unless there is only one rank."""
        if self.world_size == 1:
            remedies.explain_one_rank(self.gradient_sync.unused_hook)
        else:
            super().configure_ddp()
            self._pl_static_graph_delay_done = False
        if self.lightning_module is not None:
            self.gradient_sync.resume(self.lightning_module)

    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        remedies.warn_of_fp16_under_scaler(self.plan.comm_hook, self.precision_plugin)
        remedies.warn_of_missing_buffers(self.model, self.plan)
        self.gradient_sync.attach(self.model, timeout=self._timeout, ranks_per_node=self.num_processes)

    def on_train_start(self) -> None:
        super().on_train_start()
        unused = self.gradient_sync.unused_hook
        if unused is not None and self.world_size > 1 and self.gradient_sync.model is None:
            remedies.warn_of_unregistered_hook(unused, self)
        self._manual_backward_check = ManualBackwardCheck(self.model, self.lightning_module, self.optimizers)

    def pre_backward(self, closure_loss: Tensor) -> None:
        self._manual_backward_check.close()
        super().pre_backward(closure_loss)
        if (trainable := self.gradient_sync.trainable) is not None:
            assert self.lightning_module is not None
            remedies.check_backward(
                trainable, self.lightning_module, self.optimizers, is_static=bool(self.plan.static_graph)
            )

    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        is_manual = (module := self.lightning_module) is not None and not module.automatic_optimization
        self.gradient_sync.end_backward(ends_static_graph=is_manual and not self._flushes_static_graph)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        if self.gradient_sync.must_sync:
            yield
        else:
            with super().block_backward_sync():
                yield

    def apply_plan(self, plan: CommPlan | str | Mapping[str, Any] | Compressor) -> None:
        """Changes the plan, also in the middle of a fit.

        All ranks must call it, with equal plans. Between two batches it takes effect at once, within a batch before the
        next one. Accumulated gradients are kept, and a compressor's residual is added to the next gradients. A change
        between lossless plans changes nothing else about training.

        Args:
            plan: the new plan; or a value of ``comm_hook`` ("bf16", a compressor, ...), which replaces only that option
                of the plan in use.

        Raises:
            OptionError: ``plan`` is neither, the strategy has a ``ddp_comm_hook`` too, ``ranks_per_node`` does not
                divide the number of ranks, or the ranks' plans differ. The old plan stays.
        """
        if not isinstance(plan, CommPlan):
            plan = (self._next_plan or self.plan).with_comm_hook(plan)
        self.gradient_sync.check_plan(plan)
        self._next_plan = plan
        if not self._is_in_batch():
            self._apply_next_plan()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._apply_next_plan()
        must_rewrap = self.gradient_sync.must_rewrap(self.optimizers, is_first_batch=batch_idx == 0)
        if (module := self.lightning_module) is not None and must_rewrap and not optimizer_is_toggled(module):
            self._rewrap_together()
        self.auto_plan.begin_batch(batch, batch_idx)

    def _rewrap_together(self) -> None:
        """Wraps the model again, once the same parameters have changed on all ranks."""
        model, trainable = self.gradient_sync.model, self.gradient_sync.trainable
        assert model is not None
        assert trainable is not None
        counts_frozen = not self.plan.find_unused_parameters
        self._guards.agree_on_change(trainable.changed(model, self.optimizers, counts_frozen=counts_frozen))
        self.gradient_sync.rewrap(self._wrap)

    def _is_in_batch(self) -> bool:
        """Returns whether a training batch has begun and not ended."""
        module = self.lightning_module
        return module is not None and self.gradient_sync.model is not None and batch_is_open(module.trainer)

    def _apply_next_plan(self) -> None:
        plan, self._next_plan = self._next_plan, None
        if plan is not None:
            if self.gradient_sync.model is not None:
                base.check_plans_agree(plan)
            base.replace_plan_options(self._ddp_kwargs, self.plan, plan)
            self.gradient_sync.change_plan(plan, self._wrap)

    def _wrap(self, module: Module) -> None:
        self.model = module
        self.configure_ddp()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if self._save_comm_state and "optimizer_states" in checkpoint:
            can_save = not (self._is_in_batch() or base.has_failed(self))
            saved = gather_state(self.gradient_sync.state(), self, can_save=can_save)
            if saved is not None:
                checkpoint[KEY] = self.auto_plan.add_choice(saved)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        saved, module = checkpoint.pop(KEY, None), self.lightning_module
        if base.is_fit(self):
            self.auto_plan.resume_choice(saved)
            self.gradient_sync.restore(read_state(saved, self, self.plan.comm_hook))
            # The learning rate finder loads a checkpoint when the model is wrapped already.
            if module is not None and self.gradient_sync.model is not None:
                self.gradient_sync.resume(module)
        return checkpoint

    def teardown(self) -> None:
        try:
            if self._save_comm_state and not self._is_in_batch():
                self.gradient_sync.keep_state()
            self.gradient_sync.release_wrapper()  # lets Lightning free the buckets
            super().teardown()
        finally:
            self.auto_plan.end_fit()
            self.gradient_sync.end_fit()
            self._guards.close()
            self._manual_backward_check.close()
        self._apply_next_plan()
