"""What is said of compressors that are refused: of their options, and of names that nobody knows."""

from collections.abc import Callable

import pytest

from lightning_commopt.plan import CommPlan, OptionError
from support.refusals import one_by_one, refusals

HOOKS = [
    *({"name": "powersgd", "refresh_steps": 0}, {"name": "powersgd", "residual_dtype": "float16"}),
    *({"name": "powersgd", "min_compression_rate": True}, {"name": "powersgd", "epsilon": float("inf")}),
    {"name": "powersgd", "seed": 2**63},
    *({"name": "alternating_powersgd", "matrix_rank": 0}, {"name": "bf16", "accumulate": "float64"}),
    *({"name": "int8", "block_size": 100}, {"name": "int8", "block_size": 512}, {"name": "int4", "block_size": 16}),
    *({"name": "hierarchical"}, {"name": "hierarchical", "inner": "none"}),
    {"name": "hierarchical", "inner": {"name": "hierarchical", "inner": "int8"}},
    {"name": "hierarchical", "inner": "bf16", "ranks_per_node": 0},
    *({"name": "powersgd", "rank": 2}, {"name": "powersgd", "residual_type": "bfloat16"}),
    {"name": "int8", "inner": "bf16"},
]


def test_refused_options(golden: Callable[[str, str], None]) -> None:
    """If it fails, a bad option is accepted, or the error does not say what is allowed, or meant."""
    golden("refused_options", refusals(one_by_one(CommPlan, comm_hook=HOOKS)))


@pytest.mark.parametrize(("written", "meant"), [("powersg", "powersgd"), ("fp16_compress_hook", "fp16")])
def test_unknown_names(written: str, meant: str) -> None:
    """If it fails, a typing error is answered by a list only, which depends on what is registered."""
    with pytest.raises(OptionError, match=f"did you mean '{meant}'"):
        CommPlan(comm_hook=written)  # type: ignore[arg-type]
