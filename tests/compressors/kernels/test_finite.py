"""Whether bad values are found, wherever they are."""

import itertools

import pytest
import torch
from forms import in_form, main, needs_cuda, needs_triton, run_interpreted

from lightning_commopt.compressors.kernels import elementwise

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
BAD = [float("nan"), float("inf"), float("-inf")]


def cases(numel: int) -> list[torch.Tensor]:
    """Values with a bad one at the beginning, in the middle, at the end, and with none."""
    good = [torch.full((numel,), torch.finfo(dtype).max, dtype=dtype) for dtype in DTYPES]
    bad = []
    for values, value, index in itertools.product(good, BAD, {0, numel // 2, numel - 1}):
        bad.append(values.clone())
        bad[-1][index] = value
    return [*good, *bad]


@pytest.mark.parametrize("numel", [1, 7, 1000, 20_001])
def test_a_bad_value_is_found(numel: int) -> None:
    """If it fails, what one overflow left behind stays in all later steps; or the largest number counts as one."""
    for values in cases(numel):
        assert elementwise.all_finite(values).all().equal(values.isfinite().all())


def test_nothing_is_finite() -> None:
    assert elementwise.all_finite(torch.empty(0))


def both_forms_agree(device: str) -> None:
    for values in [*cases(1), *cases(20_001), torch.empty(0)]:  # one tile, and three
        with in_form("triton"):
            found = elementwise.all_finite(values.to(device))
        assert found.device.type == device
        assert found.numel() <= 1  # as every program of a kernel reads all flags
        assert found.all().cpu().equal(elementwise.all_finite(values).all())


@pytest.mark.exhaustive
@needs_triton
def test_triton_agrees_in_its_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.gpu
@needs_cuda
def test_triton_agrees_on_cuda() -> None:
    both_forms_agree("cuda")


if __name__ == "__main__":
    main(both_forms_agree)
