"""CommOptDDP, CommOptDiLoCo and CommOptModelParallel for the Trainer of the package ``lightning``."""

from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lightning_commopt.strategy.adapters import accept_in_both_packages
from lightning_commopt.strategy.ddp import CommOptStrategy
from lightning_commopt.strategy.diloco import CommOptDiLoCoStrategy
from lightning_commopt.strategy.model_parallel import CommOptModelParallelStrategy

__all__ = ["CommOptDDP", "CommOptDiLoCo", "CommOptModelParallel"]


@accept_in_both_packages
class CommOptDDP(CommOptStrategy, DDPStrategy):  # noqa: D101
    __doc__ = CommOptStrategy.__doc__
    _flushes_static_graph = "post_backward" in vars(DDPStrategy)


@accept_in_both_packages
class CommOptDiLoCo(CommOptDiLoCoStrategy, DDPStrategy):  # noqa: D101
    __doc__ = CommOptDiLoCoStrategy.__doc__


@accept_in_both_packages
class CommOptModelParallel(CommOptModelParallelStrategy, ModelParallelStrategy):  # noqa: D101
    __doc__ = CommOptModelParallelStrategy.__doc__
