"""What rounding drops, against float64; whether bad values are found, wherever they are; and that both forms agree."""

import itertools

import numpy as np
import pytest
import torch
from forms import in_form, main, needs_cuda, needs_triton, run_interpreted
from torch import Tensor

from lightning_commopt.compressors.kernels import elementwise
from lightning_commopt.compressors.kernels.elementwise import CHUNK_NUMEL

NUMELS = [1, 17, 4099, CHUNK_NUMEL + 5]
DTYPES = [torch.float32, torch.float64]
NARROW = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half a unit in the last place
RESIDUALS = [None, torch.float32, torch.bfloat16]
SCALE = 1 / 3
CASES = [
    (1, torch.float32, torch.bfloat16, torch.float32),
    (17, torch.float64, torch.float16, torch.bfloat16),
    (17, torch.float32, torch.bfloat16, None),
    (4099, torch.float32, torch.float16, torch.float32),
    (4099, torch.float64, torch.bfloat16, None),
    (CHUNK_NUMEL + 5, torch.float32, torch.bfloat16, torch.bfloat16),
    (CHUNK_NUMEL + 5, torch.float64, torch.float16, torch.float32),
]
BAD = [float("nan"), float("inf"), float("-inf")]


def bucket(numel: int, dtype: torch.dtype, residual_dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(numel)
    flat, residual = torch.randn(2, numel, generator=generator, dtype=torch.float64)
    return flat.to(dtype), None if residual_dtype is None else residual.mul(0.01).to(residual_dtype)


def exact(flat: Tensor, residual: Tensor | None) -> np.ndarray:
    return (flat.double() + (0 if residual is None else residual.double())).numpy()


def precision(residual: Tensor) -> float:
    return 2.0**-8 if residual.dtype == torch.bfloat16 else 2.0**-23


@pytest.mark.parametrize(("numel", "dtype", "narrow", "residual_dtype"), CASES)
def test_what_is_sent_and_kept(
    numel: int, dtype: torch.dtype, narrow: torch.dtype, residual_dtype: torch.dtype | None
) -> None:
    """If it fails, more is rounded off than the dtype does, or it is lost."""
    flat, residual = bucket(numel, dtype, residual_dtype)
    wanted, sent = exact(flat, residual), torch.empty(numel, dtype=narrow)
    elementwise.narrow(flat, residual, SCALE, sent)
    np.testing.assert_allclose(sent.double().numpy(), wanted * SCALE, rtol=NARROW[narrow] * 1.001, atol=1e-7)
    if residual is not None:
        mean = torch.randn(numel).to(narrow)
        elementwise.widen(flat, residual, mean, SCALE, torch.tensor(True))
        kept = wanted - sent.double().numpy() / SCALE
        np.testing.assert_allclose(residual.double().numpy(), kept, rtol=precision(residual), atol=1e-6)
        assert flat.equal(mean.to(dtype))


@pytest.mark.parametrize("numel", NUMELS)
def test_a_step_that_is_not_finite_leaves_the_residual(numel: int) -> None:
    """If it fails, an overflow outlives its step."""
    flat, residual = bucket(numel, torch.float32, torch.float32)
    assert residual is not None
    before, mean = residual.clone(), torch.full((numel,), torch.nan, dtype=torch.bfloat16)
    elementwise.widen(flat, residual, mean, SCALE, torch.tensor(False))
    elementwise.add_lost(residual, torch.ones(numel), torch.zeros(numel), 3, torch.tensor(False))
    assert residual.equal(before)
    assert flat.isnan().all()


@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16])
def test_what_the_mean_lost_stays_in_the_residual(residual_dtype: torch.dtype) -> None:
    """If it fails, the second rounding of an average is lost."""
    values, residual = bucket(999, torch.float32, residual_dtype)
    assert residual is not None
    rounded = values.bfloat16()
    wanted = residual.double() + 3 * (values.double() - rounded.double())
    elementwise.add_lost(residual, values, rounded, 3, torch.tensor(True))
    np.testing.assert_allclose(residual.double(), wanted, rtol=precision(residual), atol=1e-7)


@pytest.mark.parametrize(("num_rows", "numel"), [(1, 5), (3, 5), (8, 4099), (3, CHUNK_NUMEL + 5)])
@pytest.mark.parametrize("narrow", NARROW)
def test_rows_are_added_up_in_the_wider_dtype(narrow: torch.dtype, num_rows: int, numel: int) -> None:
    """If it fails, partial sums are rounded, or a row is left out."""
    rows = torch.randn(num_rows, numel, generator=torch.Generator().manual_seed(numel)).to(narrow)
    out, rounded, alone = torch.empty(numel), *torch.empty(2, numel, dtype=narrow)
    elementwise.sum_rows(rows, out, rounded, torch.float32)
    elementwise.sum_rows(rows, None, alone, torch.float32)
    np.testing.assert_allclose(out.double(), rows.double().sum(0), rtol=1e-5, atol=1e-5)
    assert rounded.equal(out.to(narrow))
    assert alone.equal(rounded)


def test_the_end_of_a_message_is_zero() -> None:
    """If it fails, what nobody has written is sent, and may be no number."""
    out = torch.full((20,), torch.nan, dtype=torch.bfloat16)
    elementwise.narrow(torch.ones(17), None, 0.5, out)
    assert out.equal(torch.tensor([0.5] * 17 + [0.0] * 3).bfloat16())


def values_with_a_bad_one(numel: int) -> list[Tensor]:
    """Values with a bad one at the beginning, in the middle, at the end, and with none."""
    good = [torch.full((numel,), torch.finfo(dtype).max, dtype=dtype) for dtype in (*DTYPES, *NARROW)]
    bad = []
    for values, value, index in itertools.product(good, BAD, {0, numel // 2, numel - 1}):
        bad.append(values.clone())
        bad[-1][index] = value
    return [*good, *bad]


@pytest.mark.parametrize("numel", [1, 7, 1000, 20_001])
def test_a_bad_value_is_found(numel: int) -> None:
    """If it fails, what one overflow left behind stays in all later steps; or the largest number counts as one."""
    for values in values_with_a_bad_one(numel):
        assert elementwise.all_finite(values).all().equal(values.isfinite().all())


def test_nothing_is_finite() -> None:
    assert elementwise.all_finite(torch.empty(0))


def results(
    device: str, numel: int, dtype: torch.dtype, narrow: torch.dtype, residual_dtype: torch.dtype | None, finite: bool
) -> list[Tensor]:
    """What is sent of a step, and the bucket and the residual after it."""
    flat, residual = (None if x is None else x.to(device) for x in bucket(numel, dtype, residual_dtype))
    assert flat is not None
    message = torch.full((numel + 5000,), torch.nan, dtype=narrow, device=device)
    elementwise.narrow(flat, residual, SCALE, message)
    sent, rest = message[:numel], message[numel:]
    assert not rest.any()
    rows = torch.stack([sent, sent * 0.1, sent * 0.7])
    sums, rounded, alone = torch.empty_like(flat), torch.empty_like(sent), torch.empty_like(sent)
    elementwise.sum_rows(rows, sums, rounded, dtype)
    elementwise.sum_rows(rows, None, alone, dtype)
    added = [sums.cpu(), rounded.cpu(), alone.cpu()]
    if residual is None:
        elementwise.convert(sent, flat)
        return [sent.cpu(), *added, flat.cpu()]
    mean, is_finite = (sent * 2).to(narrow), torch.ones(140, dtype=torch.bool, device=device)
    is_finite[-1] = finite
    elementwise.widen(flat, residual, mean, SCALE, is_finite)
    elementwise.add_lost(residual, sums.clone(), rounded, 3, is_finite)
    return [sent.cpu(), *added, flat.cpu(), residual.cpu()]


def both_forms_agree(device: str) -> None:
    """Compares the bits; but the interpreter cuts bfloat16 off where devices round to nearest."""
    cases = list(itertools.product((1, 17, 4099), DTYPES, NARROW, RESIDUALS, (True, False)))
    for case in cases[:: 5 if device == "cpu" else 1]:  # the interpreter is slow
        plain = results("cpu", *case)
        with in_form("triton"):
            by_triton = results(device, *case)
        cut_off = device == "cpu" and torch.bfloat16 in case
        tolerance = {"rtol": 2.0**-6, "atol": 0.1} if cut_off else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(by_triton, plain, **tolerance)
    for values in [*values_with_a_bad_one(1), *values_with_a_bad_one(20_001), torch.empty(0)]:  # one tile, and three
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
def test_triton_gives_the_bits_of_plain_torch_on_cuda() -> None:
    both_forms_agree("cuda")


if __name__ == "__main__":
    main(both_forms_agree)
