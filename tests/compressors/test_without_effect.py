"""A compressor that sends gradients as they are is told of, once; one that does not never is."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_commopt import CommOptDDP
from lightning_commopt.compressors import compressor_from_config
from lightning_commopt.sync.ddp.attach import warn_if_idle
from lightning_commopt.text import validation
from support.ranks import run_ranks
from support.strategy_models import Tiny, loader, trainer

BF16, F32 = torch.bfloat16, torch.float32


def _parameters(*dtypes: torch.dtype) -> list[Tensor]:
    return [torch.zeros(shape, dtype=dtype) for dtype in dtypes for shape in ((40, 30), (30,))]


def _warnings(comm_hook: Any, parameters: list[Tensor]) -> list[str]:
    validation.warn_once.cache_clear()
    compressor = compressor_from_config(comm_hook)
    assert compressor is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_idle(compressor, parameters)
        warn_if_idle(compressor, parameters)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("comm_hook", "dtypes", "reason"),
    [
        ("bf16", [BF16], "comm_hook 'bf16' saves nothing here: gradients are bfloat16 already."),
        ("fp16", [BF16], "comm_hook 'fp16' saves nothing here: gradients are bfloat16 already."),
        ("bf16", [torch.float16, BF16], "gradients are bfloat16 already; gradients are float16 already."),
        ({"name": "after_steps", "inner": "bf16", "start_step": 2}, [BF16], "gradients are bfloat16 already."),
        ({"name": "by_size", "inner": "int8", "min_numel": 2000}, [F32], "no gradient has min_numel=2000 elements."),
        ({"name": "by_size", "inner": "bf16", "min_numel": 100}, [BF16], "gradients are bfloat16 already."),
        ({"name": "powersgd", "matrix_rank": 16}, [F32], "no gradient is a matrix that shrinks enough"),
        ({"name": "alternating_powersgd", "min_compression_rate": 90}, [F32], "(min_compression_rate=90)."),
    ],
)
def test_what_saves_nothing_is_told_once(comm_hook: Any, dtypes: list[torch.dtype], reason: str) -> None:
    (message,) = _warnings(comm_hook, _parameters(*dtypes))
    assert message.endswith(reason) or reason in message


@pytest.mark.parametrize(
    ("comm_hook", "dtypes"),
    [
        ("bf16", [F32]),
        ("bf16", [torch.float64]),
        ("bf16", [BF16, F32]),  # as with norms in float32
        ({"name": "bf16", "accumulate": "float32"}, [BF16]),  # sums are more exact
        ("int8", [BF16]),
        ({"name": "hierarchical", "inner": "bf16"}, [BF16]),  # fewer bytes cross nodes
        ("powersgd", [F32]),
        ({"name": "by_size", "inner": "int8", "min_numel": 1000}, [F32]),
        ("all_reduce", [F32]),
    ],
)
def test_what_saves_something_is_not(comm_hook: Any, dtypes: list[torch.dtype]) -> None:
    assert _warnings(comm_hook, _parameters(*dtypes)) == []


def _fits() -> list[list[str]]:
    told = []
    for precision, comm_hook in (
        ("bf16-true", "bf16"),
        ("32-true", "bf16"),
        ("bf16-mixed", "bf16"),
        ("32-true", {"name": "hierarchical", "ranks_per_node": 2, "inner": "bf16"}),
        ("32-true", {"name": "hierarchical", "ranks_per_node": 1, "inner": "bf16"}),
        ("32-true", {"name": "by_size", "min_numel": 2, "inner": {"name": "powersgd", "start_step": 9}}),
    ):
        validation.warn_once.cache_clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            strategy = CommOptDDP(comm_hook=comm_hook, bucket_cap_mb=0.001)
            trainer(strategy, precision=precision, max_epochs=1).fit(Tiny(), loader(24))
        told.append([str(warning.message) for warning in caught if "comm_hook" in str(warning.message)])
    return told


def test_fits_tell_it_on_rank_0() -> None:
    """If it fails, somebody trains on with an option that does nothing, or every rank prints a line."""
    first, second = run_ranks(_fits)
    assert second == [[]] * 6
    narrow, wide, mixed, one_node, nodes_of_one, late = first
    assert narrow == ["comm_hook 'bf16' saves nothing here: gradients are bfloat16 already."]
    assert wide == mixed == []
    assert one_node == ["comm_hook: 'hierarchical' compresses nothing here: all ranks are on one node."]
    assert [message[:46] for message in nodes_of_one] == ["comm_hook: 'hierarchical' has no effect here: "]
    assert late == ["comm_hook never compressed: training took 3 steps, but start_step=9."]
