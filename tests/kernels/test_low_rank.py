"""Products with thin factors, against float64, and that their two forms agree."""

import itertools

import numpy as np
import pytest
import torch
from interpreted import fused, main, needs_cuda, needs_triton, run_interpreted
from torch import Tensor

from lightning_commopt.kernels import low_rank
from lightning_commopt.kernels.low_rank import Matrix, p_shapes, q_shapes, views

RANKS = [1, 2, 3, 5, 8]
DTYPES = [torch.float32, torch.float64]
OWED = [None, torch.float32, torch.bfloat16]
# The last ones are longer than a chunk in one direction or the other.
SIDES = {
    "one": [(9, 13)],
    "many": [(40, 130), (8, 9), (257, 33), (33, 257), (64, 128)],
    "long": [(600, 700), (8, 2**18 + 3)],
}
SMALL = {"one": SIDES["one"], "many": SIDES["many"], "aligned": [(300, 32), (40, 260)]}


class Bucket:
    """Matrices with other elements before, between and behind them, and random factors of them."""

    def __init__(self, sides: list[tuple[int, int]], r: int, dtype: torch.dtype, owed: torch.dtype | None) -> None:
        gap = 4 if all(k % 4 == 0 for _, k in sides) else 3
        ends = list(itertools.accumulate((m * k + gap for m, k in sides), initial=gap))
        self.matrices = tuple(Matrix(start, m, k, r) for start, (m, k) in zip(ends, sides, strict=False))
        generator = torch.Generator().manual_seed(len(sides) + r)

        def random(numel: int, its_dtype: torch.dtype) -> Tensor:
            return torch.randn(numel, generator=generator, dtype=torch.float64).to(its_dtype)

        self.flat = random(ends[-1], dtype)
        self.residual = None if owed is None else random(ends[-1], owed)
        num_p, num_q = (sum(a * b for a, b in shapes(self.matrices)) for shapes in (p_shapes, q_shapes))
        self.own = random(num_p, dtype), random(num_q, dtype)
        self.mean = random(num_p, dtype), random(num_q, dtype)
        is_matrix = torch.zeros(ends[-1], dtype=torch.bool)
        for matrix in self.matrices:
            matrix.of(is_matrix).fill_(True)
        self.others = ~is_matrix

    def to(self, device: str) -> "Bucket":
        self.flat, self.others = self.flat.to(device), self.others.to(device)
        self.residual = None if self.residual is None else self.residual.to(device)
        self.own, self.mean = ((p.to(device), q.to(device)) for p, q in (self.own, self.mean))
        return self

    def exact(self) -> list[np.ndarray]:
        """Returns all matrices with the residual added."""
        flat = self.flat.double() + (0 if self.residual is None else self.residual.double())
        return [matrix.of(flat).numpy() for matrix in self.matrices]

    def factors(self, pair: tuple[Tensor, Tensor]) -> list[tuple[np.ndarray, np.ndarray]]:
        ps, qs = views(pair[0], p_shapes(self.matrices)), views(pair[1], q_shapes(self.matrices))
        return [(p.double().numpy(), q.double().numpy()) for p, q in zip(ps, qs, strict=True)]


grid = [
    pytest.mark.parametrize("sides", SIDES),
    pytest.mark.parametrize("r", RANKS),
    pytest.mark.parametrize("dtype", DTYPES),
    pytest.mark.parametrize("owed", OWED),
]


def over_grid(test):
    for mark in grid:
        test = mark(test)
    return test


def assert_near(actual: np.ndarray, wanted: np.ndarray, dtype: torch.dtype) -> None:
    """Compares to a precision in units of the largest element, as a sum has it."""
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-13, torch.bfloat16: 2.0**-8}[dtype]
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=tolerance * max(1.0, np.abs(wanted).max()))


@over_grid
def test_products(sides: str, r: int, dtype: torch.dtype, owed: torch.dtype | None) -> None:
    """If it fails, factors stand for another matrix, or a residual is added twice or not at all."""
    for by_rows in (True, False):
        bucket = Bucket(SIDES[sides], r, dtype, owed)
        before, (p, q) = bucket.flat.clone(), bucket.own
        wanted = bucket.exact()
        factors = bucket.factors(bucket.own)
        if by_rows:
            low_rank.multiply_rows(bucket.flat, bucket.residual, bucket.matrices, q, p)
        else:
            low_rank.multiply_columns(bucket.flat, bucket.residual, bucket.matrices, p, q)
        for matrix, whole, old, new in zip(bucket.matrices, wanted, factors, bucket.factors(bucket.own), strict=True):
            assert_near(matrix.of(bucket.flat).double().numpy(), whole, dtype)
            assert_near(new[0], old[1] @ whole.T if by_rows else old[0], dtype)
            assert_near(new[1], old[1] if by_rows else old[0] @ whole, dtype)
        assert bucket.flat[bucket.others].equal(before[bucket.others])


@over_grid
def test_settling(sides: str, r: int, dtype: torch.dtype, owed: torch.dtype | None) -> None:
    """If it fails, what is kept is not what was not sent, or the average is wrong."""
    bucket = Bucket(SIDES[sides], r, dtype, owed)
    residual = bucket.residual
    before = bucket.flat.clone(), None if residual is None else residual.clone()
    low_rank.settle(bucket.flat, residual, bucket.matrices, bucket.own, bucket.mean, torch.tensor(True))
    own, mean = bucket.factors(bucket.own), bucket.factors(bucket.mean)
    for matrix, (own_p, own_q), (p, q) in zip(bucket.matrices, own, mean, strict=True):
        assert_near(matrix.of(bucket.flat).double().numpy(), p.T @ q, dtype)
        if residual is not None:
            rest = matrix.of(before[0]).double().numpy() - own_p.T @ own_q
            assert_near(
                matrix.of(residual).double().numpy(), rest, min(dtype, residual.dtype, key=lambda x: x.itemsize)
            )
    assert bucket.flat[bucket.others].equal(before[0][bucket.others])
    if residual is not None and before[1] is not None:
        assert residual[bucket.others].equal(before[1][bucket.others])


@pytest.mark.parametrize("sides", SIDES)
def test_a_step_that_is_not_finite_leaves_the_residual(sides: str) -> None:
    """If it fails, an overflow outlives its step, or a gradient scaler does not see it."""
    bucket = Bucket(SIDES[sides], 2, torch.float32, torch.float32)
    assert bucket.residual is not None
    before = bucket.residual.clone()
    low_rank.settle(bucket.flat, bucket.residual, bucket.matrices, bucket.own, bucket.mean, torch.tensor(False))
    assert bucket.residual.equal(before)
    assert bucket.flat.isnan().equal(~bucket.others)


def results(
    device: str, sides: list[tuple[int, int]], r: int, dtype: torch.dtype, owed: torch.dtype | None, finite: bool
) -> list[Tensor]:
    """Everything that the operations write."""
    bucket = Bucket(sides, r, dtype, owed).to(device)
    flat, residual, matrices, (p, q) = bucket.flat, bucket.residual, bucket.matrices, bucket.own
    written = []
    new_p, new_q = torch.full_like(p, torch.nan), torch.full_like(q, torch.nan)
    low_rank.multiply_rows(flat, residual, matrices, q, new_p)
    written += [flat.clone(), new_p]
    low_rank.multiply_columns(flat, residual, matrices, p, new_q)
    written += [flat.clone(), new_q]
    low_rank.settle(flat, residual, matrices, bucket.own, bucket.mean, torch.tensor(finite, device=device))
    return [x.cpu() for x in (*written, flat, *([] if residual is None else [residual]))]


def both_forms_agree(device: str) -> None:
    """The interpreter cuts bfloat16 off where devices round to nearest, and is slow: it gets some of the cases."""
    for name, sides in SMALL.items():
        cases = list(itertools.product(RANKS if name == "many" else (2,), DTYPES, OWED, (True, False)))
        for case in cases[:: 7 if device == "cpu" else 1]:
            plain = results("cpu", sides, *case)
            with fused(low_rank):
                by_triton = results(device, sides, *case)
            for ours, theirs in zip(by_triton, plain, strict=True):
                rtol = 2.0**-6 if theirs.dtype == torch.bfloat16 else 1e-5
                torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-4, equal_nan=True)


@needs_triton
def test_triton_agrees_in_its_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.gpu
@needs_cuda
def test_triton_agrees_on_cuda() -> None:
    both_forms_agree("cuda")


@pytest.mark.gpu
@needs_cuda
def test_bits_are_the_same_every_time_on_cuda() -> None:
    """If it fails, a run cannot be repeated."""
    sides = [(4000, 1000), (1000, 4000), (511, 513)]
    first, *others = (results("cuda", sides, 4, torch.float32, torch.float32, True) for _ in range(4))
    for other in others:
        assert all(a.equal(b) for a, b in zip(first, other, strict=True))


if __name__ == "__main__":
    main(both_forms_agree)
