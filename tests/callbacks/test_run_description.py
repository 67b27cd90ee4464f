"""What a fit's records hold of what averages its gradients, and what they recommend instead of it."""

from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from lightning_commopt import CommOptDDP
from lightning_commopt.callbacks.run_description import describe_hook


def _custom(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("strategy", "name", "is_lossy", "alternatives", "milder"),
    [
        ({}, "none", False, ["bf16", "int8", "int4", "powersgd"], ""),
        ({"comm_hook": "all_reduce"}, "all_reduce", False, ["bf16", "int8", "int4", "powersgd"], ""),
        ({"comm_hook": "fp16"}, "fp16", True, ["int8", "powersgd"], ""),
        ({"comm_hook": {"name": "powersgd", "matrix_rank": 8}}, "powersgd", True, [], "bf16"),
        ({"comm_hook": {"name": "hierarchical", "inner": "bf16"}}, "hierarchical", True, ["powersgd"], "bf16"),
        ({"ddp_comm_hook": default_hooks.allreduce_hook}, "allreduce_hook", False, ["bf16"], ""),
        ({"ddp_comm_hook": default_hooks.bf16_compress_hook}, "bf16_compress_hook", True, ["int8", "powersgd"], ""),
        ({"ddp_comm_hook": powerSGD_hook.batched_powerSGD_hook}, "batched_powerSGD_hook", True, [], "bf16"),
        ({"ddp_comm_hook": _custom}, "_custom", True, ["powersgd"], "bf16"),
    ],
)
def test_what_to_try_instead(
    strategy: dict[str, Any], name: str, is_lossy: bool, alternatives: list[str], milder: str
) -> None:
    """If it fails, a summary recommends what the fit has already, or more loss than is needed."""
    described = describe_hook(CommOptDDP(**strategy))
    assert (described["comm_hook"], described["is_lossy"], described["milder"]) == (name, is_lossy, milder)
    names = [other["name"] for other in described["alternatives"]]
    assert names[: len(alternatives)] == alternatives
    assert all(0 < other["share"] < 1 for other in described["alternatives"])
    assert bool(described["cheaper_with"]) == ("powersgd" in name.lower())
