"""Protocols for what packages below ``strategy`` use of a running strategy: its ranks, its devices and its plan."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn import Module

from lightning_commopt.measure.observer import Observers
from lightning_commopt.plan import CommPlan, Plan

if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment
    from lightning.fabric.strategies.launchers.launcher import _Launcher
    from lightning.pytorch import LightningModule, Trainer


class LightningStrategy(Protocol):
    """A strategy of a Trainer, ours or another one."""

    @property
    def model(self) -> Module | None:
        """The module that is trained, or DDP's wrapper of it once it is set up."""


class RunningStrategy(Protocol):
    """A strategy of a Trainer or of Fabric whose ranks have been started, perhaps without a process group yet."""

    @property
    def num_nodes(self) -> int: ...

    @property
    def num_processes(self) -> int:
        """Number of ranks on each node."""

    @property
    def node_rank(self) -> int: ...

    @property
    def local_rank(self) -> int: ...

    @property
    def global_rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def root_device(self) -> torch.device: ...

    @property
    def process_group_backend(self) -> str | None: ...

    @property
    def timeout(self) -> timedelta:
        """Limit of each collective of its process group."""

    @property
    def cluster_environment(self) -> ClusterEnvironment | None:
        """Lightning's environment, which knows the ranks; None if the strategy has not been passed to a Trainer."""

    @property
    def launcher(self) -> _Launcher | None:
        """Lightning's launcher; None if something else has started the processes."""


class TrainersStrategy(RunningStrategy, Protocol):
    """A strategy of a Trainer."""

    @property
    def lightning_module(self) -> LightningModule | None:
        """The module; None before the Trainer has connected one."""


def trainer_of(strategy: TrainersStrategy) -> Trainer:
    """Returns the Trainer of a strategy that has a module."""
    assert strategy.lightning_module is not None
    return strategy.lightning_module.trainer


class WatchedStrategy(TrainersStrategy, Protocol):
    """A strategy of a Trainer whose fits are watched."""

    @property
    def uneven_batches(self) -> str:
        """What happens if ranks have different numbers of batches: one of `POLICIES`."""

    @property
    def start_method(self) -> str:
        """How the processes of a node are started: "popen", "spawn", "fork" or "forkserver"."""


class PlannedStrategy(RunningStrategy, Protocol):
    """A strategy with a plan that may change while it trains."""

    @property
    def plan(self) -> Plan: ...

    def apply_plan(self, plan: Any) -> None:
        """Changes the plan. All ranks must call it, with equal plans of the same class as the present one."""


class BucketedStrategy(PlannedStrategy, Protocol):
    """A strategy that wraps modules in DDP, and wraps them again to change its plan."""

    @property
    def plan(self) -> CommPlan: ...

    @property
    def sync_observers(self) -> Observers: ...

    def without_init_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which modules are wrapped without sending parameters, if this torch can do that."""


class TunedStrategy(LightningStrategy, PlannedStrategy, TrainersStrategy, Protocol):
    """A strategy of a Trainer with a plan that may change."""


class TunedBuckets(TunedStrategy, BucketedStrategy, Protocol):
    """A strategy of a Trainer that wraps its model in DDP."""
