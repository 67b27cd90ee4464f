"""The options of each strategy, which are validated here, and their conversion to JSON and back.

`ShardedPlan` has to be imported from its module, because that loads FSDP2, which takes seconds.
"""

from lightning_commopt.plan.base import OptionError, Plan, UnknownOptionError
from lightning_commopt.plan.ddp import CommPlan
from lightning_commopt.plan.diloco import DiLoCoPlan

__all__ = ["CommPlan", "DiLoCoPlan", "OptionError", "Plan", "UnknownOptionError"]
