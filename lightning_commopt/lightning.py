"""CommOptDDP for the Trainer of the package ``lightning``."""

from lightning.pytorch.strategies import DDPStrategy

from lightning_commopt.strategy.adapters import accept_everywhere
from lightning_commopt.strategy.ddp import CommOptStrategy

__all__ = ["CommOptDDP"]


@accept_everywhere
class CommOptDDP(CommOptStrategy, DDPStrategy):  # noqa: D101
    __doc__ = CommOptStrategy.__doc__
    _flushes_static_graph = "post_backward" in vars(DDPStrategy)
