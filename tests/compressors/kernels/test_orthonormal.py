"""Orthonormal rows of any factors, in both forms."""

import itertools

import numpy as np
import pytest
import torch
from forms import in_form, main, needs_cuda, needs_triton, run_interpreted
from torch import Tensor

from lightning_commopt.compressors.kernels import factors
from lightning_commopt.compressors.kernels.factors import views

Shapes = tuple[tuple[int, int], ...]

SHAPES: list[Shapes] = [
    ((1, 9),),
    ((1, 700), (1, 5)),
    ((2, 2), (2, 1030)),
    ((3, 50), (1, 7), (5, 5)),
    ((5, 2100), (3, 11)),
    ((8, 70), (8, 3000)),
]
MANY_TILES: list[Shapes] = [((8, 9000), (8, 40))]  # more than are added up at once
FEW_SHAPES = SHAPES[2::3]  # for the interpreter, which is slow
DTYPES = [torch.float32, torch.float64]
EPSILON = 0.0
YES, NO = torch.tensor(True), torch.tensor(False)


def numel(shapes: Shapes) -> int:
    return sum(r * side for r, side in shapes)


def random(shapes: Shapes, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel(shapes), generator=generator, dtype=torch.float64).to(dtype)


def old_rows(shapes: Shapes, dtype: torch.dtype) -> Tensor:
    """Orthonormal rows, made by numpy."""
    bases = [np.linalg.qr(x.double().numpy().T)[0].T.ravel() for x in views(random(shapes, dtype, seed=1), shapes)]
    return torch.from_numpy(np.concatenate(bases)).to(dtype)


def gram_schmidt(x: Tensor) -> np.ndarray:
    """Returns the basis in float64: QR with a positive diagonal."""
    basis, triangle = np.linalg.qr(x.double().numpy().T)
    return (basis * np.where(np.diag(triangle) < 0, -1, 1)).T


def conditioned(shapes: Shapes, condition: float) -> Tensor:
    """Random factors whose rows are nearly the same."""
    x = random(shapes, torch.float64)
    for part in views(x, shapes):
        part[1:] = part[0] + part[1:] / condition
    return x.float()


def deficient(shapes: Shapes) -> dict[str, Tensor]:
    """Factors of a rank below ``r``, and the old rows themselves in another order."""
    zeros = random(shapes, torch.float32)
    multiples, ones, reversed_old = zeros.clone(), torch.ones_like(zeros), old_rows(shapes, torch.float32)
    for part in views(zeros, shapes):
        part[::2] = 0
    for part in views(multiples, shapes):
        part[1:] = part[:1] * 3
    for part in views(reversed_old, shapes):
        part.copy_(part.flip(0).clone())
        part[1:] = 0
    return {"zeros": zeros, "multiples": multiples, "ones": ones, "old": reversed_old, "none": torch.zeros_like(ones)}


def assert_orthonormal(basis: Tensor, shapes: Shapes, tolerance: float = 3e-5, may_be_zero: bool = False) -> None:
    for part in views(basis, shapes):
        gram = part.double().numpy() @ part.double().numpy().T
        wanted = np.diag(np.round(np.diag(gram)).clip(0, 1)) if may_be_zero else np.eye(len(part))
        np.testing.assert_allclose(gram, wanted, rtol=0, atol=tolerance)


def orthonormalize(x: Tensor, shapes: Shapes, old: Tensor | None, epsilon: float = EPSILON) -> Tensor:
    """Returns the basis for finite factors."""
    basis, finite = factors.orthonormalize(x, shapes, old, epsilon)
    assert finite.all()
    return basis.cpu()


def check_random(
    device: str, dtype: torch.dtype, all_shapes: list[Shapes] = SHAPES, scales: tuple[float, ...] = (1, 1e-35, 1e35)
) -> None:
    for shapes, with_old, scale in itertools.product(all_shapes, (True, False), scales):
        x = random(shapes, dtype) * scale
        old = old_rows(shapes, dtype).to(device) if with_old else None
        basis = orthonormalize(x.to(device), shapes, old)
        assert_orthonormal(basis, shapes, 3e-6 if dtype == torch.float32 else 1e-13)
        for part, its_x in zip(views(basis, shapes), views(x, shapes), strict=True):
            # A square factor's last rows are what is left of cancellation.
            atol = 2e-4 if dtype == torch.float32 else 1e-12
            np.testing.assert_allclose(part.double().numpy(), gram_schmidt(its_x), rtol=0, atol=atol)


def check_nearly_parallel(
    device: str, all_shapes: list[Shapes] = SHAPES, conditions: tuple[float, ...] = (1e2, 1e4, 1e6)
) -> None:
    for shapes, condition in itertools.product(all_shapes, conditions):
        x, old = conditioned(shapes, condition).to(device), old_rows(shapes, torch.float32).to(device)
        assert_orthonormal(orthonormalize(x, shapes, old), shapes)


def check_deficient(device: str, with_old: bool, all_shapes: list[Shapes] = SHAPES) -> None:
    for shapes in all_shapes:
        old = old_rows(shapes, torch.float32).to(device) if with_old else None
        for x in deficient(shapes).values():
            basis = orthonormalize(x.to(device), shapes, old)
            assert_orthonormal(basis, shapes, may_be_zero=not with_old)
            for part, its_x in zip(views(basis.double(), shapes), views(x.double(), shapes), strict=True):
                torch.testing.assert_close(its_x @ part.T @ part, its_x, rtol=0, atol=1e-3)


def check_not_finite(device: str, all_shapes: list[Shapes] = SHAPES) -> None:
    for shapes, dtype, bad in itertools.product(all_shapes, DTYPES, (float("nan"), float("inf"))):
        old = old_rows(shapes, dtype).to(device)
        rest = torch.zeros(20_000, dtype=dtype, device=device)
        good = torch.cat([random(shapes, dtype).to(device), rest])
        for place, before in ((0, None), (len(old) - 1, None), (len(old), None), (-1, YES), (None, NO)):
            x = good.clone()
            if place is not None:
                x[place] = bad
            before = None if before is None else before.repeat(200).to(device)
            for fallback in (old, None):
                basis, finite = factors.orthonormalize(x, shapes, fallback, EPSILON, before)
                assert not finite.all()
                assert basis.equal(torch.zeros_like(old) if fallback is None else fallback)
        for before in (None, YES.to(device), YES.repeat(200).to(device)):
            assert factors.orthonormalize(good, shapes, old, EPSILON, before)[1].all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gram_schmidt(dtype: torch.dtype) -> None:
    """If it fails, factors are no basis, or rows change sides from step to step."""
    check_random("cpu", dtype)


def test_rows_that_are_nearly_parallel() -> None:
    """If it fails, what is sent twice is counted twice."""
    check_nearly_parallel("cpu")


@pytest.mark.parametrize("with_old", [True, False])
def test_no_row_dies(with_old: bool) -> None:
    """If it fails, a gradient that had a low rank once is compressed to that rank for ever."""
    check_deficient("cpu", with_old)


@pytest.mark.exhaustive
def test_a_step_that_is_not_finite_leaves_the_old_rows() -> None:
    """If it fails, an overflow outlives its step."""
    check_not_finite("cpu")


def test_epsilon_shortens_a_single_row() -> None:
    basis = orthonormalize(torch.tensor([3.0, 4.0]), ((1, 2),), None, 0.25)
    torch.testing.assert_close(basis, torch.tensor([0.48, 0.64]))


def both_forms_agree(device: str) -> None:
    is_interpreted = device == "cpu"
    shapes = FEW_SHAPES if is_interpreted else SHAPES
    with in_form("triton"):
        if is_interpreted:
            check_random(device, torch.float32, shapes, scales=(1e35,))
            check_random(device, torch.float32, MANY_TILES, scales=(1,))
            check_nearly_parallel(device, shapes, conditions=(1e6,))
        else:
            check_random(device, torch.float32, MANY_TILES)
            check_random(device, torch.float32)
            check_nearly_parallel(device)
        check_deficient(device, True, shapes)
        check_deficient(device, False, shapes)
        check_not_finite(device, shapes[:1] if is_interpreted else shapes)
        short = orthonormalize(torch.tensor([3.0, 4.0], device=device), ((1, 2),), None, 0.25)
        torch.testing.assert_close(short, torch.tensor([0.48, 0.64]))


@pytest.mark.exhaustive  # interpretation is slow
@needs_triton
def test_triton_in_its_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.gpu
@needs_cuda
def test_triton_on_cuda() -> None:
    both_forms_agree("cuda")


@pytest.mark.gpu
@needs_cuda
def test_many_rows_on_cuda() -> None:
    """If it fails, ranks for which there is no fused form do not work on CUDA, or those near the limit do not fit."""
    for r in (16, 32, 33):
        shapes = ((r, 1000), (3, 40))
        old = old_rows(shapes, torch.float32).cuda()
        assert_orthonormal(orthonormalize(random(shapes, torch.float32).cuda(), shapes, old), shapes)


if __name__ == "__main__":
    main(both_forms_agree)
