"""What tests of strategies and callbacks use of Lightning, from the package that LIGHTNING_PACKAGE names.

LIGHTNING_PACKAGE=pytorch_lightning python -m pytest --all tests/strategy tests/callbacks
"""

import os
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import pytest

from lightning_commopt.compat.hooks import SIGTERM_BROADCAST
from lightning_commopt.strategy.adapters import ADAPTERS

PACKAGE = os.environ.get("LIGHTNING_PACKAGE", "lightning.pytorch")
ADAPTER = ADAPTERS[PACKAGE]

if TYPE_CHECKING or PACKAGE == "lightning.pytorch":
    from lightning.fabric.utilities import registry
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, callbacks, seed_everything
    from lightning.pytorch.callbacks import (
        BaseFinetuning,
        EarlyStopping,
        ModelCheckpoint,
        OnExceptionCheckpoint,
        ThroughputMonitor,
    )
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.loggers import CSVLogger, Logger
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.plugins.io import TorchCheckpointIO
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
    from lightning.pytorch.utilities import CombinedLoader
else:
    from lightning_fabric.utilities import registry
    from lightning_fabric.utilities.exceptions import MisconfigurationException
    from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer, callbacks, seed_everything
    from pytorch_lightning.callbacks import (
        BaseFinetuning,
        EarlyStopping,
        ModelCheckpoint,
        OnExceptionCheckpoint,
        ThroughputMonitor,
    )
    from pytorch_lightning.core.optimizer import LightningOptimizer
    from pytorch_lightning.demos.boring_classes import BoringModel
    from pytorch_lightning.loggers import CSVLogger, Logger
    from pytorch_lightning.plugins.environments import LightningEnvironment
    from pytorch_lightning.plugins.io import TorchCheckpointIO
    from pytorch_lightning.plugins.precision import MixedPrecision
    from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
    from pytorch_lightning.utilities import CombinedLoader

# Each Trainer looks for callbacks in the metadata of all installed packages: a fifth of the time of a short fit.
vars(registry)["entry_points"] = cache(entry_points)

HAS_SIGTERM_BROADCAST = hasattr(import_module(f"{PACKAGE}.loops")._TrainingEpochLoop, SIGTERM_BROADCAST)
needs_sigterm_broadcast = pytest.mark.skipif(
    not HAS_SIGTERM_BROADCAST, reason="Lightning broadcasts SIGTERM between batches from 2.5.2 on"
)

__all__ = [
    "ADAPTER",
    "HAS_SIGTERM_BROADCAST",
    "PACKAGE",
    "BaseFinetuning",
    "BoringModel",
    "CSVLogger",
    "Callback",
    "CombinedLoader",
    "DDPStrategy",
    "EarlyStopping",
    "LightningDataModule",
    "LightningEnvironment",
    "LightningModule",
    "LightningOptimizer",
    "Logger",
    "MisconfigurationException",
    "MixedPrecision",
    "ModelCheckpoint",
    "ModelParallelStrategy",
    "OnExceptionCheckpoint",
    "SingleDeviceStrategy",
    "ThroughputMonitor",
    "TorchCheckpointIO",
    "Trainer",
    "callbacks",
    "needs_sigterm_broadcast",
    "seed_everything",
]
