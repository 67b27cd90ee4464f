"""CommOptModelParallel for a Trainer, whichever package the Trainer is from."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from lightning_commopt.compat.sigterm import SigtermCheck
from lightning_commopt.strategy.adapters import moving_accelerator
from lightning_commopt.strategy.arguments import check_arguments, named_arguments
from lightning_commopt.strategy.base import refuse_ray
from lightning_commopt.strategy.fit import check_sigterm
from lightning_commopt.text.formatting import byte_unit
from lightning_commopt.text.validation import info

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ModelParallelStrategy as _ModelParallelStrategy
else:
    _ModelParallelStrategy = object


class CommOptModelParallelStrategy(_ModelParallelStrategy):
    """Lightning's ``ModelParallelStrategy`` with less communication where gradients are accumulated.

    Takes all that ``ModelParallelStrategy`` takes, in the same order, and the keywords below. Lightning's own
    reduce-scatters, and with replicas all-reduces, the gradients of every batch that it accumulates.

    Args:
        data_parallel_size: see ``ModelParallelStrategy``, as for all arguments down to ``timeout``.
        accumulate_grads: what a rank adds up over ``accumulate_grad_batches``. "sharded": its shard, reduce-scattered
            in every batch; replicas (HSDP) are averaged only with the last one, which costs no memory. "unsharded":
            the gradients of all parameters, which are reduce-scattered only with the last batch. Each rank then holds
            gradients as large as the model during accumulation, in place of its shard of them: the first use prints
            the number of bytes.
        sigterm_every_n_steps: let the ranks agree on SIGTERM before every n-th optimizer step and at the end of an
            epoch, and end together. None for Lightning's own way: since 2.5.2 a broadcast before every batch.

    Raises:
        OptionError: an option is out of range.
    """

    def __init__(
        self,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        *,
        accumulate_grads: Literal["sharded", "unsharded"] = "sharded",
        sigterm_every_n_steps: int | None = None,
    ) -> None:
        given = named_arguments(locals())
        check_arguments(given)
        self._accumulates_unsharded = given.pop("accumulate_grads") == "unsharded"
        self._sigterm_every_n_steps = given.pop("sigterm_every_n_steps")
        self._sigterm_check: SigtermCheck | None = None
        self._has_printed_size = False
        self._lightnings_arguments = given
        super().__init__(**given)

    accelerator = moving_accelerator
    _check_environment = refuse_ray

    def _configure_launcher(self) -> None:
        self._check_environment()
        super()._configure_launcher()

    def setup_environment(self) -> None:
        """Joins the process group, and replaces Lightning's check for SIGTERM if an option asks for that."""
        super().setup_environment()
        self._sigterm_check = check_sigterm(self, self._sigterm_every_n_steps)

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

    def teardown(self) -> None:
        """Gives Lightning's check for SIGTERM back."""
        if self._sigterm_check is not None:
            self._sigterm_check.close()
            self._sigterm_check = None
        super().teardown()


def gradient_bytes(sharded: Iterable[Module]) -> tuple[int, int]:
    """Returns the bytes of all gradients that a rank has without sharding and with it, in the parameters' dtype.

    Args:
        sharded: the modules on which ``fully_shard`` was called.
    """
    parameters: dict[Parameter, None] = {}
    for module in sharded:
        parameters.update(dict.fromkeys(each for each in module.parameters() if each.requires_grad))
    unsharded_bytes = sharded_bytes = 0
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            local = parameter.to_local()
            # Of a mesh of replicas, shards and parts of a tensor the first sharded dimension is that of FSDP.
            dimension = next((i for i, each in enumerate(parameter.placements) if not each.is_replicate()), None)
            num_shards = 1 if dimension is None else parameter.device_mesh.size(dimension)
            sharded_bytes += local.numel() * local.element_size()
            unsharded_bytes += min(local.numel() * num_shards, parameter.numel()) * local.element_size()
    return unsharded_bytes, sharded_bytes


def _require_sync(sharded: Iterable[FSDPModule], is_required: bool, *, unsharded: bool) -> None:
    for module in sharded:
        if unsharded:
            module.set_requires_gradient_sync(is_required, recurse=False)
        else:
            module.set_requires_all_reduce(is_required, recurse=False)
