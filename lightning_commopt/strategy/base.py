"""What the strategies for the Trainer and for Fabric share: they follow a CommPlan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.strategies import _StrategyRegistry
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_info
from typing_extensions import Self

from lightning_commopt.collectives.groups import let_gloo_finish_at_exit
from lightning_commopt.plan import CommPlan, plan_options
from lightning_commopt.strategy.aliases import register_aliases


class FollowsPlan:
    """Mixed into a DDP strategy whose keywords are the options of a plan."""

    _plan: CommPlan

    @classmethod
    def from_plan(cls, plan: CommPlan | str | Path, **kwargs: Any) -> Self:
        """Makes a strategy from a plan.

        Args:
            plan: the plan, or the path of a file that `CommPlan.save` wrote.
            **kwargs: the arguments of the strategy that are no options of a plan.

        Raises:
            OptionError: the file holds no valid plan.
        """
        plan = plan if isinstance(plan, CommPlan) else CommPlan.load(plan)
        return cls(**{name: getattr(plan, name) for name in plan_options()}, **kwargs)

    @property
    def plan(self) -> CommPlan:
        """How gradients travel at present."""
        return self._plan

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Registers ``commopt_ddp`` and its variants, so that ``strategy="commopt_ddp_bf16"`` works."""
        register_aliases(strategy_registry, cls)


def check_group(world_size: int, strategy: str) -> None:
    """Refuses a process group that has more or fewer ranks than the strategy, and sees to a clean end of the process.

    Args:
        world_size: of the strategy.
        strategy: its name.

    Raises:
        MisconfigurationException: the sizes differ.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() != world_size:
        raise MisconfigurationException(
            f"{strategy} was made for {world_size} processes, but the process group that exists has"
            f" {dist.get_world_size()}. Probably an earlier training run in this process left it behind: call"
            " torch.distributed.destroy_process_group() and remove LOCAL_RANK and WORLD_SIZE from the environment"
            " after each run, or start every run in a process of its own (commopt-train does)."
        )
    let_gloo_finish_at_exit()


def say_one_rank(**hooks: Any) -> None:
    """Says once why there is no wrapper, and which of the hooks are therefore not used."""
    unused = [name for name, hook in hooks.items() if hook is not None]
    rank_zero_info(
        "CommOptDDP: one process, so there are no gradients to exchange: the model is trained without the"
        f" DistributedDataParallel wrapper{f'; {unused[0]} is not used' if unused else ''}."
    )
