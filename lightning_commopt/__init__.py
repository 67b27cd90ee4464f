"""Make data-parallel PyTorch Lightning training wait less for gradients."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_commopt.compressors import AfterSteps, AllReduce, BySize, Cast, Compressor, ErrorFeedback, PowerSGD
from lightning_commopt.plan import CommPlan
from lightning_commopt.strategy.ddp import CommOptDDP

__all__ = [
    "AfterSteps",
    "AllReduce",
    "BySize",
    "Cast",
    "CommOptDDP",
    "CommPlan",
    "Compressor",
    "ErrorFeedback",
    "PowerSGD",
]

CommOptDDP.register_strategies(StrategyRegistry)
