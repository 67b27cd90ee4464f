"""DiLoCoPlan and ShardedPlan: names, derived options, and refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from torch.distributed.fsdp import FSDPModule

from lightning_commopt import CommOptModelParallel, fabric
from lightning_commopt.plan import CommPlan, DiLoCoPlan, OptionError
from lightning_commopt.plan.sharded import ShardedPlan


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "DiLoCo every 30 steps"),
        ({"sync_every": 5, "comm_hook": "int8"}, "DiLoCo every 5 steps, int8"),
        ({"fragments": 2, "fragment_by": "bytes"}, "DiLoCo every 30 steps, 2 fragments by bytes"),
        ({"overlap": 3, "mixing": 0.25}, "DiLoCo every 30 steps, overlap 3, mixing 0.25"),
        ({"outer_lr": 1.0, "outer_momentum": 0.0}, "DiLoCo every 30 steps, outer lr 1, momentum 0"),
        ({"nesterov": False}, "DiLoCo every 30 steps, no Nesterov"),
        ({"eval_weights": "local"}, "DiLoCo every 30 steps, local weights in validation"),
        ({"inner": "ddp"}, "DiLoCo every 30 steps, DDP within nodes"),
        (
            {"inner": {"bucket_cap_mb": 5}},
            f"DiLoCo every 30 steps, DDP within nodes ({CommPlan(bucket_cap_mb=5).name})",
        ),
    ],
)
def test_names_of_diloco(options: dict[str, Any], name: str) -> None:
    assert DiLoCoPlan(**options).name == name


@pytest.mark.parametrize(
    ("options", "share"),
    [({}, 0.0), ({"overlap": 1}, 0.5), ({"overlap": 1, "mixing": 0.0}, 0.0), ({"mixing": 0.25}, 0.25)],
)
def test_the_share_of_own_parameters(options: dict[str, Any], share: float) -> None:
    assert DiLoCoPlan(**options).own_share == share


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "uncompressed"),
        ({"comm_hook": "int8", "param_hook": "int8"}, "int8, int8 parameters"),
        ({"accumulate_grads": "unsharded"}, "uncompressed, accumulate unsharded"),
        ({"reduce_scatter_max_input_buffers": 2}, "uncompressed, 2 input buffers"),
        ({"separate_reduce_scatter_group": True}, "uncompressed, separate reduce-scatter group"),
    ],
)
def test_names_of_sharded_plans(options: dict[str, Any], name: str) -> None:
    assert ShardedPlan(**options).name == name


def test_numbers_of_numpy_in_json() -> None:
    """If it fails, a plan with a number of NumPy cannot be saved, nor the record of a run with it."""
    plan = DiLoCoPlan(sync_every=np.int64(5), outer_lr=np.float32(0.5))  # type: ignore[arg-type]
    assert DiLoCoPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("comm_hook", "int8"), ("param_hook", "int8")),
        *(("separate_reduce_scatter_group", True), ("reduce_scatter_max_input_buffers", 2)),
    ],
)
def test_a_plan_that_this_torch_cannot_carry_out_can_be_read(
    option: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, runs of a newer torch cannot be read here, or a strategy takes what it cannot carry out."""
    for name in ("set_custom_reduce_scatter", f"set_{option}"):
        monkeypatch.delattr(FSDPModule, name, raising=False)
    plan = ShardedPlan.from_dict({option: value})
    strategy = CommOptModelParallel()
    in_fabric = fabric.CommOptModelParallel(lambda module, mesh: module)
    for try_it in (
        partial(CommOptModelParallel, plan=plan),
        partial(CommOptModelParallel, **{option: value}),
        partial(strategy.apply_plan, plan),
        partial(fabric.CommOptModelParallel, lambda module, mesh: module, plan=plan),
        partial(in_fabric.apply_plan, plan),
    ):
        with pytest.raises(OptionError, match=rf"{option} (of CommOptModelParallel )?needs "):
            try_it()


def test_options_of_ddp_are_refused_with_the_reason() -> None:
    with pytest.raises(OptionError, match="static_graph is an option of DDP, which cannot apply to sharded models"):
        ShardedPlan.from_dict({"static_graph": True})


def test_what_is_saved_is_what_differs_from_the_defaults() -> None:
    """If it fails, a file that one version has saved keeps the defaults of that version."""
    assert DiLoCoPlan().to_dict() == {}
    assert DiLoCoPlan(sync_every=5, nesterov=False).to_dict() == {"sync_every": 5, "nesterov": False}


def test_a_plan_of_another_strategy_is_refused() -> None:
    """If it fails, CommOptDDP takes a DiLoCoPlan, and ends in the first step with an AttributeError."""
    with pytest.raises(OptionError, match="plan must be a CommPlan, the path of a file or None, got DiLoCoPlan"):
        CommPlan.of(DiLoCoPlan())
