"""CommOptDDP for the workers of Ray Train, with the Trainer of the package that Ray has found."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from lightning_commopt.lightning import CommOptDDP as _CommOptDDP
else:
    _CommOptDDP = adapter_for(package_of_class(RayDDPStrategy))

__all__ = ["CommOptDDP"]


class CommOptDDP(_CommOptDDP, RayDDPStrategy):  # noqa: D101
    __doc__ = CommOptStrategy.__doc__

    @property
    def num_processes(self) -> int:
        """The number of workers on this node; Lightning would count the devices of this worker."""
        return get_context().get_local_world_size()

    def _check_environment(self) -> None:
        if not isinstance(self.cluster_environment, RayLightningEnvironment):
            raise MisconfigurationException(
                "lightning_commopt.ray.CommOptDDP trains in the workers of Ray Train, with"
                " Trainer(plugins=[ray.train.lightning.RayLightningEnvironment()]); anywhere else use"
                " lightning_commopt.CommOptDDP."
            )
