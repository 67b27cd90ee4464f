"""CommOptDDP and CommOptModelParallel for workers of Ray Train, for the Lightning package that Ray uses."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_utilities.core.imports import compare_version

try:
    import ray

    if not compare_version("ray", operator.ge, "2.51"):
        raise ImportError(f"this is Ray {ray.__version__}")
    from ray.train import get_context
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment
except ImportError as error:
    raise ImportError(
        f"lightning_commopt.ray needs Ray Train 2.51 or newer: pip install 'lightning-commopt[ray]' ({error})"
    ) from error

from lightning_commopt.compat.lightning import MisconfigurationException, package_of_class
from lightning_commopt.strategy.adapters import adapter_for
from lightning_commopt.strategy.ddp import CommOptStrategy
from lightning_commopt.strategy.model_parallel import CommOptModelParallelStrategy

if TYPE_CHECKING:
    from lightning_commopt.lightning import CommOptDDP as _CommOptDDP
    from lightning_commopt.lightning import CommOptModelParallel as _CommOptModelParallel
else:
    _package = package_of_class(RayDDPStrategy)
    _CommOptDDP = adapter_for(_package)
    _CommOptModelParallel = adapter_for(_package, "CommOptModelParallel")

__all__ = ["CommOptDDP", "CommOptModelParallel"]

_T = TypeVar("_T")


class _InWorkers:
    """Adapts a strategy to the workers of Ray Train, which starts them, and whose environment it requires."""

    cluster_environment: Any

    @property
    def num_processes(self) -> int:
        """The number of workers on this node; Lightning would count the devices of this worker."""
        return int(get_context().get_local_world_size())

    def _check_environment(self) -> None:
        if not isinstance(self.cluster_environment, RayLightningEnvironment):
            name = type(self).__name__
            raise MisconfigurationException(
                f"lightning_commopt.ray.{name} trains in the workers of Ray Train, with"
                " Trainer(plugins=[ray.train.lightning.RayLightningEnvironment()]); anywhere else use"
                f" lightning_commopt.{name}."
            )


class CommOptDDP(_InWorkers, _CommOptDDP, RayDDPStrategy):  # noqa: D101
    __doc__ = CommOptStrategy.__doc__


class CommOptModelParallel(_InWorkers, _CommOptModelParallel):  # noqa: D101
    __doc__ = CommOptModelParallelStrategy.__doc__

    root_device = RayDDPStrategy.root_device
    _is_saving = False

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Saves each worker's shard at the worker's own path, since Ray's report merges the files of all workers."""
        self._is_saving = True
        try:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        finally:
            self._is_saving = False

    def broadcast(self, obj: _T, src: int = 0) -> _T:
        """Broadcasts an object, except for the path to save at, which workers of other nodes must not share."""
        return obj if self._is_saving else super().broadcast(obj, src)


# prepare_trainer accepts only Ray's own classes. With its FSDP1 class Lightning would clip and cast differently.
RayDDPStrategy.register(CommOptModelParallel)
