"""Make data-parallel PyTorch Lightning training wait less for gradients.

Importing the package imports neither torch nor Lightning; the names below are imported when they are first used.
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from lightning_commopt.compat.import_hook import call_after_import
from lightning_commopt.strategy.adapters import REGISTRIES, register_with

__all__ = [
    "AfterSteps",
    "AllReduce",
    "AlternatingPowerSGD",
    "BySize",
    "Cast",
    "Claims",
    "CommOptDDP",
    "CommOptDiLoCo",
    "CommOptModelParallel",
    "CommPlan",
    "Compressor",
    "DiLoCoPlan",
    "ErrorFeedback",
    "Hierarchical",
    "Int4",
    "Int8",
    "NcclOptions",
    "OptionError",
    "PowerSGD",
    "ShardedCompressor",
    "ShardedPlan",
    "register_compressor",
    "shard",
]

__version__: str

if TYPE_CHECKING:
    from lightning_commopt.compressors import (
        AfterSteps,
        AllReduce,
        AlternatingPowerSGD,
        BySize,
        Cast,
        Claims,
        Compressor,
        ErrorFeedback,
        Hierarchical,
        Int4,
        Int8,
        PowerSGD,
        ShardedCompressor,
        register_compressor,
    )
    from lightning_commopt.launch.nccl_options import NcclOptions
    from lightning_commopt.lightning import CommOptDDP, CommOptDiLoCo, CommOptModelParallel
    from lightning_commopt.plan import CommPlan, DiLoCoPlan, OptionError
    from lightning_commopt.plan.sharded import ShardedPlan
    from lightning_commopt.strategy.sharding import shard
else:
    _MODULES = {
        "CommPlan": "lightning_commopt.plan",
        "DiLoCoPlan": "lightning_commopt.plan",
        "NcclOptions": "lightning_commopt.launch.nccl_options",
        "OptionError": "lightning_commopt.plan",
        "ShardedPlan": "lightning_commopt.plan.sharded",
        "shard": "lightning_commopt.strategy.sharding",
    }
    _PACKAGES = ("baselines", "callbacks", "compressors", "fabric", "metrics", "plan")

    def __getattr__(name: str) -> Any:
        if name in ("CommOptDDP", "CommOptDiLoCo", "CommOptModelParallel"):
            value = import_module("lightning_commopt.strategy.adapters").adapter_in_use(name)
        elif name in __all__:
            value = getattr(import_module(_MODULES.get(name, "lightning_commopt.compressors")), name)
        elif name == "__version__":
            value = metadata.version("lightning-commopt")
        elif name in _PACKAGES:
            value = import_module(f"lightning_commopt.{name}")
        else:
            raise AttributeError(f"module 'lightning_commopt' has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*__all__, *_PACKAGES, *(name for name in globals() if name.startswith("__"))})


for _module in REGISTRIES:
    call_after_import(_module, register_with)
