"""Ways to average a gradient bucket over ranks; one algorithm a file."""

from lightning_commopt.compressors.all_reduce import AllReduce
from lightning_commopt.compressors.alternating import AlternatingLowRank, AlternatingPowerSGD
from lightning_commopt.compressors.base import Compressor, Layout, Rounds, State
from lightning_commopt.compressors.blockwise import BlockInt4, BlockInt8, Int4, Int8
from lightning_commopt.compressors.by_size import BySize
from lightning_commopt.compressors.cast import Cast
from lightning_commopt.compressors.hierarchical import Hierarchical
from lightning_commopt.compressors.powersgd import LowRank, PowerSGD
from lightning_commopt.compressors.registry import (
    compressor_from_config,
    compressor_names,
    compressor_to_config,
    register_compressor,
)
from lightning_commopt.compressors.wrappers import AfterSteps, ErrorFeedback

__all__ = [
    "AfterSteps",
    "AllReduce",
    "AlternatingLowRank",
    "AlternatingPowerSGD",
    "BlockInt4",
    "BlockInt8",
    "BySize",
    "Cast",
    "Compressor",
    "ErrorFeedback",
    "Hierarchical",
    "Int4",
    "Int8",
    "Layout",
    "LowRank",
    "PowerSGD",
    "Rounds",
    "State",
    "compressor_from_config",
    "compressor_names",
    "compressor_to_config",
    "register_compressor",
]
