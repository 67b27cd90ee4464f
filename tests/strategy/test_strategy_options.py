"""What strategies say of options that they refuse."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch import nn

from lightning_commopt import (
    CommOptDDP,
    CommOptDiLoCo,
    CommOptModelParallel,
    CommPlan,
    DiLoCoPlan,
    OptionError,
    ShardedPlan,
    fabric,
    shard,
)
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
    *one_by_one(CommOptDDP, timeout=[30, timedelta()], start_method=["forks"], process_group_backend=[1]),
    *one_by_one(CommOptDDP, accelerator=[2, "int8", "auto"], parallel_devices=[2], device_ids=[[0]]),
    *one_by_one(CommOptDDP, ddp_comm_hook=["bf16"], ddp_comm_wrapper=[1], model_averaging_period=[0]),
    *one_by_one(CommOptDDP, plan=["bf16"]),
    *one_by_one(fabric.CommOptDDP, accelerator=["int8"], timeout=[30], start_method=["forks"], device_ids=[[0]]),
]
_ON_NODES = {"name": "hierarchical", "inner": "int8"}
DILOCO = [
    *one_by_one(CommOptDiLoCo, patience_s=[0, "long"]),
    *(
        (CommOptDiLoCo, {"patience_s": 3, **option})
        for option in ({"inner": "ddp"}, {"sigterm_every_n_steps": 5}, {"comm_hook": _ON_NODES})
    ),
    # Known before the ranks of a fit have joined, whatever the compressor is in.
    (CommOptDiLoCo, {"patience_s": 3, "comm_hook": {"name": "by_size", "min_numel": 2, "inner": _ON_NODES}}),
    *one_by_one(DiLoCoPlan, mixing=[1.0]),
    *one_by_one(CommOptDiLoCo, accelerator=["int8"], plan=["int8"]),
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
    *one_by_one(CommOptModelParallel, data_parallel_size=["int8", -1, None], tensor_parallel_size=[2.0]),
    *one_by_one(fabric.CommOptModelParallel, parallelize_fn=["int8"]),
    *one_by_one(CommOptModelParallel, reduce_scatter_max_input_buffers=[0], separate_reduce_scatter_group=[1]),
    (CommOptModelParallel, {"plan": ShardedPlan(), "param_hook": "int8"}),
    (CommOptModelParallel, {"uneven_batches": "pad", "watch": False}),
    *one_by_one(shard_tiny, blocks=[0, nn.LSTM, "x"]),
]


def test_of_ddp(golden: Callable[[str, str], None]) -> None:
    """If it fails, an option is silently without effect, or changes what is in a checkpoint by a typing error."""
    golden("refused_options", refusals([*DDP, *BASELINES], OptionError))


def test_of_diloco(golden: Callable[[str, str], None]) -> None:
    """If it fails, a fit that needs all ranks begins with a promise to go on without some."""
    golden("refused_options_of_diloco", refusals(DILOCO, OptionError))


@takes_collectives
def test_of_fsdp2(golden: Callable[[str, str], None]) -> None:
    """If it fails, an option that cannot apply is ignored, or refused without the reason."""
    golden("refused_options_of_fsdp2", refusals(FSDP2, OptionError))


@pytest.mark.parametrize(
    ("strategy", "option", "meant"),
    [
        (NaiveDP, "bucket_cap", "unknown option 'bucket_cap'; known options: accelerator, "),
        (InterleavedDP, "bucket_cap", "unknown option 'bucket_cap'; known options: accelerator, "),
        (CommOptModelParallel, "comm_hok", r"unknown option 'comm_hok'; known options: .*; did you mean 'comm_hook'"),
    ],
)
def test_unknown_options(strategy: Callable[..., object], option: str, meant: str) -> None:
    """If it fails, a misspelt option is silently without effect; which ones are known depends on torch."""
    with pytest.raises(UnknownOptionError, match=meant):
        strategy(**{option: 25})
