"""CommOptModelParallel for a Trainer, whichever package the Trainer is from."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module

from lightning_commopt.compat.sigterm import SigtermCheck
from lightning_commopt.compressors import ShardedCompressor
from lightning_commopt.compressors.configs import sharded_from_config
from lightning_commopt.launch.nccl_variables import NcclOptions
from lightning_commopt.plan import OptionError
from lightning_commopt.strategy.adapters import moving_accelerator
from lightning_commopt.strategy.arguments import check_arguments, named_arguments
from lightning_commopt.strategy.base import WithTimeout, check_sigterm, explain_error, is_fit, join_group, refuse_ray
from lightning_commopt.strategy.lightning_launcher import configure_launcher, forget_previous_job
from lightning_commopt.sync.gather import gather_on_rank_0
from lightning_commopt.sync.sharded import ShardedSync, check_available
from lightning_commopt.sync.sharded_checkpoint import describe, rank_state, restore, save_in_directory
from lightning_commopt.sync.sharded_gather import GatheredParameters
from lightning_commopt.sync.state import KEY
from lightning_commopt.text.formatting import byte_unit
from lightning_commopt.text.validation import info, warn_once

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy as _ModelParallelStrategy
else:
    _ModelParallelStrategy = object


class CommOptModelParallelStrategy(WithTimeout, _ModelParallelStrategy):
    """Lightning's ``ModelParallelStrategy`` with compressed gradients, and less of them while they are accumulated.

    Takes all that ``ModelParallelStrategy`` takes, in the same order, and the keywords below. Lightning's own
    reduce-scatters, and with replicas all-reduces, the gradients of every batch that it accumulates.

    Args:
        data_parallel_size: see ``ModelParallelStrategy``, as for all arguments down to ``timeout``. With a
            ``comm_hook`` the default of this and ``tensor_parallel_size`` is that all ranks are data-parallel.
        comm_hook: how gradients travel in FSDP2's reduce-scatters: None or "none" for FSDP2's own; "bf16", "int8" or
            "int4"; or a mapping of a name and options (``{"name": "int8", "error_feedback": True}``), see `ShardedInt8`
            and its neighbours; "hierarchical" compresses with its ``inner`` across nodes only. Parameters of one
            dimension travel uncompressed, and so do all-reduces between replicas. Lossy. Needs torch >= 2.9.
        param_hook: how parameters travel in FSDP2's all-gathers: None for FSDP2's own, "int8" for blocks of 128 with
            one scale each. Forward and backward then compute with rounded parameters; the optimizer keeps exact ones.
            Parameters of one dimension travel as they are. Lossy. Needs torch >= 2.9.
        save_comm_state: save the residuals of ``comm_hook`` in checkpoints, so that training resumes exactly; with
            another number of ranks their mean is used. In a directory they have a folder of their own.
        accumulate_grads: what a rank adds up over ``accumulate_grad_batches``. "sharded": its shard, reduce-scattered
            in every batch; replicas (HSDP) are averaged only with the last one, which costs no memory. "unsharded":
            the gradients of all parameters, which are reduce-scattered only with the last batch. Each rank then holds
            gradients as large as the model during accumulation, in place of its shard of them: the first use prints
            the number of bytes.
        separate_reduce_scatter_group: let reduce-scatters have process groups of their own, so that they overlap with
            all-gathers; see ``FSDPModule.set_separate_reduce_scatter_group``, which not all versions of torch have.
        reduce_scatter_max_input_buffers: of a rank at a time, None for FSDP2's own; see
            ``FSDPModule.set_reduce_scatter_max_input_buffers``, which not all versions of torch have.
        sigterm_every_n_steps: let the ranks agree on SIGTERM before every n-th optimizer step and at the end of an
            epoch, and end together. None for Lightning's own way: since 2.5.2 a broadcast before every batch.
        nccl: see `lightning_commopt.CommOptDDP`.
        watch: report what the process group waits for while it is made, and end a rank that joins in vain.

    Attributes:
        sharded_sync: of the gradients; None without a ``comm_hook``.

    Raises:
        OptionError: an option is out of range, or this torch cannot do what it asks for.
    """

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
        sigterm_every_n_steps: int | None = None,
        nccl: str | dict[str, Any] | NcclOptions | None = None,
        watch: bool = True,
    ) -> None:
        given = named_arguments(locals())
        check_arguments(given)
        self.sharded_sync = sharded_sync(given.pop("comm_hook"))
        self._gathered: GatheredParameters | None = None
        if given.pop("param_hook") is not None:
            check_available("param_hook")
            self._gathered = GatheredParameters()
        self._saves_comm_state = given.pop("save_comm_state")
        self._fsdp_options = fsdp_options(
            given.pop("separate_reduce_scatter_group"), given.pop("reduce_scatter_max_input_buffers")
        )
        self._accumulates_unsharded = given.pop("accumulate_grads") == "unsharded"
        self._sigterm_every_n_steps = given.pop("sigterm_every_n_steps")
        self._sigterm_check: SigtermCheck | None = None
        self._nccl = NcclOptions.from_config(given.pop("nccl"))
        self._watch = given.pop("watch")
        self._has_printed_size = False
        self._lightnings_arguments = given
        forget_previous_job()
        super().__init__(**given)

    accelerator = moving_accelerator
    _check_environment = refuse_ray

    def _configure_launcher(self) -> None:
        self._check_environment()
        super()._configure_launcher()
        configure_launcher(self)

    def _setup_distributed(self) -> None:
        with join_group(self, watch=self._watch, nccl=self._nccl):
            super()._setup_distributed()

    def setup_environment(self) -> None:
        if (self.sharded_sync or self._gathered) and self._data_parallel_size == self._tensor_parallel_size == "auto":
            self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()
        self._sigterm_check = check_sigterm(self, self._sigterm_every_n_steps)

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        assert self.model is not None
        covered: set[Module] = set()
        for module in self.model.modules():
            if isinstance(module, FSDPModule) and module not in covered:
                covered.update(module.modules())  # at once: units over the same ranks then share a group
                for setter, value in self._fsdp_options.items():
                    getattr(module, setter)(value)
        if self._fsdp_options and not covered:
            names = ", ".join(setter.removeprefix("set_") for setter in self._fsdp_options)
            warn_once(f"{names} has no effect: the model has no unit of FSDP2.")
        if not is_fit(self) or (self.sharded_sync is None and self._gathered is None):
            return
        if not covered:
            raise OptionError(
                "comm_hook: configure_model has not sharded the model, so there is no reduce-scatter to compress: call"
                " lightning_commopt.shard or fully_shard in it"
            )
        if self._gathered is not None:
            self._gathered.attach(self.model)
        if self.sharded_sync is not None:
            self.sharded_sync.attach(self.model, ranks_per_node=self.num_processes, timeout=self._timeout)
            self.sharded_sync.allow_overlap()

    @property
    def comm_hook(self) -> ShardedCompressor | None:
        """Compresses the reduce-scatters; None where FSDP2's own are used."""
        return None if self.sharded_sync is None else self.sharded_sync.compressor

    @property
    def is_lossy(self) -> bool:
        """Whether ``comm_hook`` or ``param_hook`` change numbers."""
        return self.sharded_sync is not None or self._gathered is not None

    @property
    def wire_bytes(self) -> int | None:
        """Payload bytes of gradients handed to reduce-scatters, which count half; None without a ``comm_hook``."""
        return None if self.sharded_sync is None else self.sharded_sync.wire_bytes

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Blocks, in backward, what accumulated gradients need only with the last batch; see ``accumulate_grads``."""
        assert self.model is not None
        sharded = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        if self._accumulates_unsharded and sharded and not self._has_printed_size:
            self._has_printed_size = True
            unsharded_bytes, sharded_bytes = gradient_bytes(sharded)
            unit = byte_unit(unsharded_bytes)
            info(
                "CommOptModelParallel(accumulate_grads='unsharded'): while gradients are accumulated, each rank holds"
                f" {unit.text(unsharded_bytes)} of gradients instead of {unit.text(sharded_bytes)}."
            )
        _require_sync(sharded, False, unsharded=self._accumulates_unsharded)
        try:
            with super().block_backward_sync():
                yield
        finally:
            _require_sync(sharded, True, unsharded=self._accumulates_unsharded)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        sync = self.sharded_sync
        if sync is None or not sync.units or not self._saves_comm_state or "optimizer_states" not in checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        checkpoint[KEY] = describe(sync)
        if not self._save_distributed_checkpoint:
            checkpoint[KEY]["ranks"] = gather_on_rank_0(rank_state(sync), self.root_device)
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self._save_distributed_checkpoint:
            save_in_directory(sync, Path(self.broadcast(filepath)))

    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        checkpoint = super().load_checkpoint(path, *args, **kwargs)
        saved = checkpoint.pop(KEY, None)
        if saved is not None and self.sharded_sync is not None and is_fit(self):
            restore(self.sharded_sync, saved, path if path.is_dir() else None)
        return checkpoint

    def on_exception(self, exception: BaseException) -> None:
        explain_error(exception)
        super().on_exception(exception)

    def teardown(self) -> None:
        if self._accumulates_unsharded and not self._has_printed_size and has_stepped(self):
            warn_once("accumulate_grads='unsharded' had no effect: no gradients were accumulated.")
        for comm_objects in (self.sharded_sync, self._gathered):
            if comm_objects is not None:
                comm_objects.detach()
        if self._sigterm_check is not None:
            self._sigterm_check.close()
            self._sigterm_check = None
        super().teardown()


def sharded_sync(comm_hook: Any) -> ShardedSync | None:
    """Returns what compresses reduce-scatters, None without compression; raises an OptionError for a wrong option."""
    try:
        compressor = sharded_from_config(comm_hook)
    except (ValueError, TypeError) as error:
        raise OptionError(f"comm_hook: {error}") from error
    if compressor is None:
        return None
    check_available()
    return ShardedSync(compressor)


def fsdp_options(separate_group: bool, max_input_buffers: int | None) -> dict[str, Any]:
    """Returns what is to be set on each unit, by the method of ``FSDPModule``, which this torch must have."""
    given = {"separate_reduce_scatter_group": separate_group, "reduce_scatter_max_input_buffers": max_input_buffers}
    options = {f"set_{name}": value for name, value in given.items() if value not in (None, False)}
    for setter in options:
        if not hasattr(FSDPModule, setter):
            raise OptionError(
                f"{setter.removeprefix('set_')} needs a newer torch: {torch.__version__} has no FSDPModule.{setter}"
            )
    return options


def gradient_bytes(sharded: Iterable[Module]) -> tuple[int, int]:
    """Returns the bytes of all gradients that a rank has without sharding and with it, in the parameters' dtype."""
    unsharded_bytes = sharded_bytes = 0
    for parameter in {parameter for module in sharded for parameter in module.parameters()}:
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            local = parameter.to_local()
            # Of a mesh of replicas, shards and parts of a tensor the first sharded dimension is that of FSDP.
            dimension = next((i for i, each in enumerate(parameter.placements) if not each.is_replicate()), None)
            num_shards = 1 if dimension is None else parameter.device_mesh.size(dimension)
            sharded_bytes += local.numel() * local.element_size()
            unsharded_bytes += min(local.numel() * num_shards, parameter.numel()) * local.element_size()
    return unsharded_bytes, sharded_bytes


def has_stepped(strategy: Any) -> bool:
    """Returns whether the Trainer that a strategy belongs to is in a fit with an optimizer step behind it."""
    return is_fit(strategy) and strategy.lightning_module.trainer.global_step > 0


def _require_sync(sharded: Iterable[FSDPModule], is_required: bool, *, unsharded: bool) -> None:
    for module in sharded:
        if unsharded:
            module.set_requires_gradient_sync(is_required, recurse=False)
        else:
            module.set_requires_all_reduce(is_required, recurse=False)
