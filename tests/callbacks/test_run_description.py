"""What a fit's records hold of what averages its gradients."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from lightning_commopt import CommOptDDP, CommOptDiLoCo, CommOptModelParallel
from lightning_commopt.callbacks.run_description import describe_hook
from support.collectives import takes_collectives


def _custom(state: torch.distributed.ProcessGroup, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    return default_hooks.allreduce_hook(state, bucket)


@pytest.mark.parametrize(
    ("strategy", "name", "is_lossy"),
    [
        ({}, "none", False),
        ({"comm_hook": "all_reduce"}, "all_reduce", False),
        ({"comm_hook": "fp16"}, "fp16", True),
        ({"comm_hook": {"name": "powersgd", "matrix_rank": 8}}, "powersgd", True),
        ({"comm_hook": {"name": "hierarchical", "inner": "bf16"}}, "hierarchical", True),
        ({"ddp_comm_hook": default_hooks.allreduce_hook}, "allreduce_hook", False),
        ({"ddp_comm_hook": default_hooks.bf16_compress_hook}, "bf16_compress_hook", True),
        ({"ddp_comm_hook": powerSGD_hook.batched_powerSGD_hook}, "batched_powerSGD_hook", True),
        ({"ddp_comm_hook": _custom}, "_custom", True),
    ],
)
def test_what_averages_the_gradients(strategy: dict[str, Any], name: str, is_lossy: bool) -> None:
    """If it fails, a summary takes a lossy fit for an exact one."""
    assert describe_hook(CommOptDDP(**strategy)) == {"comm_hook": name, "is_lossy": is_lossy}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("comm_hook", "name"), [(None, "diloco"), ("int4", "diloco_int4")])
def test_what_averages_differences(comm_hook: str | None, name: str, num_ranks: int) -> None:
    """If it fails, a summary takes DiLoCo for DDP, and recommends other comm hooks of DDP."""
    with patch.object(CommOptDiLoCo, "world_size", num_ranks):
        assert describe_hook(CommOptDiLoCo(comm_hook=comm_hook)) == {"comm_hook": name, "is_lossy": True}


@takes_collectives
@pytest.mark.parametrize(
    ("options", "name", "is_lossy"),
    [
        ({}, "CommOptModelParallel", False),
        ({"comm_hook": "int8"}, "int8", True),
        ({"param_hook": "int8"}, "CommOptModelParallel", True),
    ],
)
def test_what_shards_the_gradients(options: dict[str, Any], name: str, is_lossy: bool) -> None:
    with patch.object(CommOptModelParallel, "world_size", 2):
        strategy = CommOptModelParallel(**options)
        assert describe_hook(strategy) == {"comm_hook": name, "is_lossy": is_lossy}
