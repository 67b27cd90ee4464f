"""What the strategies for the Trainer and for Fabric share."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_info

from lightning_commopt.collectives.groups import let_gloo_finish_at_exit
from lightning_commopt.plan import CommPlan, plan_options

_Strategy = TypeVar("_Strategy")


def strategy_from_plan(cls: type[_Strategy], plan: CommPlan | str | Path, **kwargs: Any) -> _Strategy:
    """Makes a strategy from a plan.

    Args:
        cls: of the strategy; its keywords are the options of a plan.
        plan: the plan, or the path of a file that `CommPlan.save` wrote.
        **kwargs: the arguments of the strategy that are no options of a plan.

    Raises:
        OptionError: the file holds no valid plan.
    """
    plan = plan if isinstance(plan, CommPlan) else CommPlan.load(plan)
    return cls(**{name: getattr(plan, name) for name in plan_options()}, **kwargs)


def plan_of(strategy: object) -> CommPlan | None:
    """Returns the plan of a strategy of ours; None for any other strategy."""
    plan = getattr(strategy, "plan", None)
    return plan if isinstance(plan, CommPlan) else None


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


def explain_one_rank(unused_hook: str | None) -> None:
    """Says on one rank why there is no wrapper.

    Args:
        unused_hook: the option whose hook has therefore nothing to do; None if there is no hook.
    """
    rank_zero_info(
        "CommOptDDP: one process, so there are no gradients to synchronize: the model is trained without the"
        f" DistributedDataParallel wrapper{f'; {unused_hook} is not used' if unused_hook else ''}."
    )
