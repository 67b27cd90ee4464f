"""How the ranks of our strategies are started, and how they join their process group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compat.lightning import package_of
from lightning_commopt.launch.nccl_options import NcclOptions
from lightning_commopt.strategy import remedies
from lightning_commopt.strategy.adapters import BASES
from lightning_commopt.strategy.base import FromPlan, has_failed, join_group, wrap_in_ddp
from lightning_commopt.strategy.fit_guards import FitGuards
from lightning_commopt.strategy.lightning_launcher import launcher_for

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _DDPStrategy
else:
    _DDPStrategy = object


class StartsRanks(FromPlan):
    """A strategy whose ranks we start and join. Its constructor must set ``_nccl`` and ``_watch``."""

    _nccl: NcclOptions | None
    _watch: bool
    _launcher: Any

    def _check_environment(self) -> None:
        """Raises if the strategy cannot start ranks where it is."""

    def _configure_launcher(self) -> None:
        self._check_environment()
        super()._configure_launcher()  # type: ignore[misc]  # a subclass also inherits it from one of Lightning's classes
        self._launcher = launcher_for(self)  # type: ignore[arg-type]
        if hasattr(self, "_start_method"):
            remedies.check_start_method(self._launcher)

    def _setup_distributed(self) -> None:
        """Joins the process group: Lightning calls it in Fabric, and for sharded models in a Trainer."""
        with join_group(self, watch=self._watch, nccl=self._nccl):  # type: ignore[arg-type]
            super()._setup_distributed()  # type: ignore[misc]


class StartedAsDDP(StartsRanks, _DDPStrategy):
    """A strategy for Trainers whose ranks are started as ``DDPStrategy`` starts them, and watched by us."""

    _guards: FitGuards
    uneven_batches: str
    _check_environment = remedies.refuse_ray

    def __repr__(self) -> str:
        """Returns a text that helps in the error of a Fabric that was given a strategy for a Trainer."""
        name = next(cls.__name__ for cls in type(self).__mro__ if cls.__name__ in BASES)
        description = f"{type(self).__module__}.{name} for {package_of(self)}.Trainer, {self.plan.name}"
        return f"<{description}; for Fabric there is lightning_commopt.fabric.{name}>"

    @property
    def start_method(self) -> str:
        """How Lightning starts the processes of a node: "popen", "spawn", "fork" or "forkserver"."""
        return self._start_method

    def setup_distributed(self) -> None:
        with join_group(self, watch=self._watch, nccl=self._nccl):
            super().setup_distributed()

    def _setup_model(self, model: Module) -> DistributedDataParallel:
        return wrap_in_ddp(model, self.determine_ddp_device_ids(), self._ddp_kwargs)

    def setup_environment(self) -> None:
        super().setup_environment()
        self._guards.start(self)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all ranks, but not on one that has failed alone, whose end the others have to notice."""
        if not (has_failed(self) and self._guards.fails_alone):
            super().barrier(*args, **kwargs)

    def on_exception(self, exception: BaseException) -> None:
        self._guards.fail(exception)
