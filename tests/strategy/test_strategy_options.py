"""What strategies say of options that they refuse."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from lightning_commopt import CommOptDDP, CommOptModelParallel, CommPlan, OptionError, ShardedPlan, shard
from lightning_commopt.baselines import InterleavedDP, NaiveDP
from lightning_commopt.plan import UnknownOptionError
from support.collectives import takes_collectives
from support.refusals import one_by_one, refusals
from support.strategy_models import Tiny


def shard_tiny(blocks: Any) -> None:
    shard(Tiny(), object(), blocks=blocks)  # type: ignore[arg-type]


DDP = [
    *one_by_one(CommOptDDP, save_comm_state=[None, "yes", 1], accumulate_grads=["unsharded"]),
    *one_by_one(CommOptDDP, uneven_batches=["dropp"], watch=["off"], sigterm_every_n_steps=[0, -1, 2.5, True, "5"]),
    *((CommOptDDP, {"uneven_batches": policy, "watch": False}) for policy in ("drop", "pad")),
    (CommOptDDP, {"uneven_batches": "allow", "sigterm_every_n_steps": 5}),
    (CommPlan.from_dict, {"options": {"param_hook": "int8"}}),
]
BASELINES = [
    call
    for strategy in (NaiveDP, InterleavedDP)
    for call in one_by_one(
        strategy,
        bucket_cap_mb=[25],
        find_unused_parameters=[True],
        ddp_comm_hook=[print],
        comm_hook=["bf16"],
        nccl=["debug"],
        start_method=["thread"],
        timeout=[5],
        process_group_backend=[1],
    )
]
FSDP2 = [
    *one_by_one(CommOptModelParallel, plan=[CommPlan(bucket_cap_mb=25), CommPlan(static_graph=False)]),
    *one_by_one(CommOptModelParallel, plan=[CommPlan.from_dict({"comm_hook": "powersgd"}), "missing.json", 3]),
    *one_by_one(CommOptModelParallel, bucket_cap_mb=[25], accumulate_grads=["unshard"], param_hook=["int4"]),
    *one_by_one(CommOptModelParallel, comm_hook=["powersgd", "int9", {"name": "int8", "blocksize": 1}, 5]),
    *one_by_one(CommOptModelParallel, uneven_batches=["drp"], sigterm_every_n_steps=[0], timeout=[5]),
    *one_by_one(CommOptModelParallel, reduce_scatter_max_input_buffers=[0], separate_reduce_scatter_group=[1]),
    (CommOptModelParallel, {"plan": ShardedPlan(), "param_hook": "int8"}),
    (CommOptModelParallel, {"uneven_batches": "pad", "watch": False}),
    *one_by_one(shard_tiny, blocks=[0, nn.LSTM, "x"]),
]


def test_of_ddp(golden: Callable[[str, str], None]) -> None:
    """If it fails, an option is silently without effect, or changes what is in a checkpoint by a typing error."""
    golden("refused_options", refusals([*DDP, *BASELINES], OptionError))


@takes_collectives
def test_of_fsdp2(golden: Callable[[str, str], None]) -> None:
    """If it fails, an option that cannot apply is ignored, or refused without the reason."""
    golden("refused_options_of_fsdp2", refusals(FSDP2, OptionError))


@pytest.mark.parametrize(
    ("strategy", "option", "meant"),
    [
        (NaiveDP, "bucket_cap", "unknown option 'bucket_cap'; known options: accelerator, "),
        (InterleavedDP, "bucket_cap", "unknown option 'bucket_cap'; known options: accelerator, "),
        (CommOptModelParallel, "comm_hok", "unknown option 'comm_hok'; did you mean 'comm_hook'"),
    ],
)
def test_unknown_options(strategy: Callable[..., object], option: str, meant: str) -> None:
    """If it fails, a misspelt option is silently without effect; which ones are known depends on torch."""
    with pytest.raises(UnknownOptionError, match=meant):
        strategy(**{option: 25})
