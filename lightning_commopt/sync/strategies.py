"""What a strategy of ours offers to the rooms below it while it runs: its ranks, its devices, its plan."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch

from lightning_commopt.measure.observer import Observers
from lightning_commopt.plan import CommPlan
from lightning_commopt.plan_base import Plan


class RunningStrategy(Protocol):
    """A strategy of a Trainer, or of Fabric, whose ranks have been started; its process group need not exist yet."""

    @property
    def num_nodes(self) -> int: ...

    @property
    def num_processes(self) -> int:
        """Ranks of each node."""

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
        """Of the collectives of its process group."""

    @property
    def cluster_environment(self) -> Any:
        """Lightning's ``ClusterEnvironment``."""

    @property
    def launcher(self) -> Any:
        """Lightning's launcher; None where something else has started the processes."""


class TrainersStrategy(RunningStrategy, Protocol):
    """A strategy of a Trainer."""

    @property
    def lightning_module(self) -> Any:
        """The module; None before the Trainer has connected one."""


class WatchedStrategy(TrainersStrategy, Protocol):
    """A strategy of a Trainer whose fits are watched."""

    @property
    def uneven_batches(self) -> str:
        """What happens where ranks have different numbers of batches: one of `POLICIES`."""

    @property
    def start_method(self) -> str:
        """How the processes of a node are started: "popen", "spawn", "fork" or "forkserver"."""


class PlannedStrategy(RunningStrategy, Protocol):
    """A strategy with a plan that may change while it trains."""

    @property
    def plan(self) -> Plan: ...

    def apply_plan(self, plan: Any) -> None:
        """Changes the plan, to one of the same class; all ranks must call it, with equal plans."""


class BucketedStrategy(PlannedStrategy, Protocol):
    """A strategy of DDP, which changes its plan by wrapping its modules anew."""

    @property
    def plan(self) -> CommPlan: ...

    @property
    def sync_observers(self) -> Observers: ...

    def without_init_sync(self) -> AbstractContextManager[None]:
        """Makes wrappers within that do not send parameters, which are equal on all ranks, where torch can do that."""


class TunedStrategy(PlannedStrategy, TrainersStrategy, Protocol):
    """A strategy of a Trainer with a plan that may change."""

    @property
    def model(self) -> Any:
        """The module, for DDP in its wrapper."""


class TunedBuckets(TunedStrategy, BucketedStrategy, Protocol):
    """A strategy of a Trainer, and of DDP."""
