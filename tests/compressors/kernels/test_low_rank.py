"""Products with thin factors, against float64, in plain torch and in C."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from forms import in_form
from torch import Tensor

from lightning_commopt.compressors.kernels import low_rank
from lightning_commopt.compressors.kernels.factors import Matrix, Parts, factors_numel, views
from support.cross_section import sampled

CHUNK_NUMEL = 2**14
RANKS = [1, 2, 3, 5, 8]  # C takes four columns at a time, or what is left of them
DTYPES = [torch.float32, torch.float64]
FORMS = ["torch", "c"]
# The last ones are longer than a chunk in one direction or the other.
SIDES = {
    "one": [(9, 13)],
    "many": [(40, 130), (8, 9), (2, 3), (257, 33), (33, 257), (64, 128)],
    "long": [(90, 700), (8, 2**14 + 3)],
}


class Bucket:
    """Matrices with other elements before, between and behind them, a residual, and random factors of all of them."""

    def __init__(self, sides: Sequence[tuple[int, int]], r: int, dtype: torch.dtype) -> None:
        gap = 4 if all(k % 4 == 0 for _, k in sides) else 3
        ends = list(itertools.accumulate((m * k + gap for m, k in sides), initial=gap))
        self.matrices = tuple(Matrix(start, m, k, r) for start, (m, k) in zip(ends, sides, strict=False))
        self.parts = Parts(self.matrices)
        generator = torch.Generator().manual_seed(len(sides) + r)

        def random(numel: int) -> Tensor:
            return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)

        self.flat, self.residual = random(ends[-1]), random(ends[-1])
        num_p, num_q = (factors_numel(shapes) for shapes in (self.parts.p_shapes, self.parts.q_shapes))
        self.sent = random(num_p), random(num_q)
        self.factors = random(num_p), random(num_q)
        is_matrix = torch.zeros(ends[-1], dtype=torch.bool)
        for matrix in self.matrices:
            matrix.of(is_matrix).fill_(True)
        self.others = ~is_matrix

    def exact(self, flat: Tensor) -> list[np.ndarray]:
        """Returns the matrices of a bucket."""
        return [matrix.of(flat).double().numpy() for matrix in self.matrices]

    def exact_factors(self, pair: tuple[Tensor, Tensor]) -> list[tuple[np.ndarray, np.ndarray]]:
        ps, qs = views(pair[0], self.parts.p_shapes), views(pair[1], self.parts.q_shapes)
        return [(p.double().numpy(), q.double().numpy()) for p, q in zip(ps, qs, strict=True)]

    def exact_residual(self) -> list[np.ndarray]:
        """Returns the residual of each matrix, with what was sent subtracted."""
        return [m - p.T @ q for m, (p, q) in zip(self.exact(self.residual), self.exact_factors(self.sent), strict=True)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes long matrices of short ones, and keeps to one thread: several wait for each other where cores are busy."""
    monkeypatch.setattr(low_rank, "CHUNK_NUMEL", CHUNK_NUMEL)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


CASES = [
    *itertools.product(FORMS, [("one", 1), ("many", 3), ("many", 4), ("long", 5), ("long", 8)], [torch.float32]),
    *itertools.product(["torch"], [("many", 2), ("long", 5)], [torch.float64]),
]


def over_cases(columns_in_c: int = max(RANKS)) -> pytest.MarkDecorator:
    """Takes all cases but those that C leaves to plain torch, which have more columns than these."""
    cases = [(form, *case, dtype) for form, case, dtype in CASES if form == "torch" or case[1] <= columns_in_c]
    return pytest.mark.parametrize(("form", "sides", "r", "dtype"), cases)


def assert_near(actual: np.ndarray, wanted: np.ndarray, dtype: torch.dtype) -> None:
    """Compares to a precision in units of the largest element, as a sum has it."""
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-13, torch.bfloat16: 2.0**-8}[dtype]
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=tolerance * max(1.0, np.abs(wanted).max()))


def fold(bucket: Bucket, by_rows: bool) -> tuple[Tensor, Tensor]:
    """Folds, and returns the factors with the new one in place of the old."""
    p, q = (x.clone() for x in bucket.factors)
    (p if by_rows else q).fill_(torch.nan)
    low_rank.fold_and_multiply(bucket.flat, bucket.residual, bucket.parts, bucket.sent, p, q, by_rows)
    return p, q


def multiply(bucket: Bucket, by_rows: bool) -> tuple[Tensor, Tensor]:
    p, q = (x.clone() for x in bucket.factors)
    (p if by_rows else q).fill_(torch.nan)
    low_rank.multiply(bucket.flat, bucket.parts, p, q, by_rows)
    return p, q


def assert_product(bucket: Bucket, pair: tuple[Tensor, Tensor], wanted: list[np.ndarray], by_rows: bool) -> None:
    for (new_p, new_q), (p, q), whole in zip(
        bucket.exact_factors(pair), bucket.exact_factors(bucket.factors), wanted, strict=True
    ):
        assert_near(new_p, q @ whole.T if by_rows else p, bucket.flat.dtype)
        assert_near(new_q, q if by_rows else p @ whole, bucket.flat.dtype)


@over_cases()
def test_folding(form: str, sides: str, r: int, dtype: torch.dtype) -> None:
    """If it fails, the residual is not what was not sent, or gradients are added twice or not at all."""
    for by_rows in (True, False):
        bucket = Bucket(SIDES[sides], r, dtype)
        flat, residual = bucket.flat.clone(), bucket.residual.clone()
        wanted = [kept + new for kept, new in zip(bucket.exact_residual(), bucket.exact(flat), strict=True)]
        with in_form(form):
            pair = fold(bucket, by_rows)
        assert bucket.flat.equal(flat)
        assert bucket.residual[bucket.others].equal(residual[bucket.others])
        for sums, exact in zip(bucket.exact(bucket.residual), wanted, strict=True):
            assert_near(sums, exact, dtype)
        assert_product(bucket, pair, wanted, by_rows)


@over_cases()
def test_products(form: str, sides: str, r: int, dtype: torch.dtype) -> None:
    """If it fails, factors stand for another matrix."""
    for by_rows in (True, False):
        bucket = Bucket(SIDES[sides], r, dtype)
        before = bucket.flat.clone()
        with in_form("torch" if by_rows else form):  # C has none by rows
            pair = multiply(bucket, by_rows)
        assert bucket.flat.equal(before)
        assert_product(bucket, pair, bucket.exact(before), by_rows)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", sampled([torch.inf, -torch.inf, torch.nan], by_default=[torch.inf, torch.nan]))
def test_gradients_that_are_not_finite_stay_out_of_the_residual(bad: float, form: str) -> None:
    """If it fails, an overflow outlives its step, or a gradient scaler does not see it."""
    for sides, r, by_rows in itertools.product(SIDES.values(), (1, 5), (True, False)):
        bucket = Bucket(sides, r, torch.float32)
        before = bucket.exact_residual()
        others = bucket.residual[bucket.others].clone()
        for matrix in bucket.matrices:
            matrix.of(bucket.flat)[0, 0] = matrix.of(bucket.flat)[matrix.m // 2, -1] = bad
        with in_form(form):
            p, q = fold(bucket, by_rows)
        for matrix, new_p, new_q in zip(
            bucket.matrices, views(p, bucket.parts.p_shapes), views(q, bucket.parts.q_shapes), strict=True
        ):
            if by_rows:
                assert not new_p[:, [0, matrix.m // 2]].isfinite().all(0).any()
            else:
                assert not new_q[:, [0, -1]].isfinite().all(0).any()
        for sums, exact in zip(bucket.exact(bucket.residual), before, strict=True):
            assert np.isfinite(sums).all()
            assert_near(sums[0, 0], exact[0, 0], torch.float32)
        low_rank.write_product(bucket.flat, bucket.residual, bucket.parts, (p, q), torch.tensor(False))
        assert bucket.flat.isnan().equal(~bucket.others)
        for sums, exact in zip(bucket.exact(bucket.residual), before, strict=True):
            assert_near(sums, exact, torch.float32)
        assert bucket.residual[bucket.others].equal(others)


@pytest.mark.parametrize("form", FORMS)
def test_huge_gradients_poison_no_residual(form: str) -> None:
    """If it fails, a sum that overflows outlives its step."""
    bucket = Bucket(SIDES["one"], 2, torch.float32)
    bucket.flat.fill_(torch.finfo(torch.float32).max)
    bucket.residual.fill_(torch.finfo(torch.float32).max / 2)
    for factor in bucket.sent:
        factor.zero_()
    with in_form(form):
        p, q = fold(bucket, by_rows=True)
    assert not p.isfinite().all()
    low_rank.write_product(bucket.flat, bucket.residual, bucket.parts, (p, q), torch.tensor(False))
    assert bucket.residual.isfinite().all()


@pytest.mark.parametrize("by_rows", [True, False])
def test_threads_change_no_bit_in_c(by_rows: bool) -> None:
    """If it fails, a resume with another number of threads goes another way."""
    results = []
    for threads in (1, 2, 3):
        bucket = Bucket([(600, 700), (300, 1001), (5, 9)], 3, torch.float32)  # of (5, 9) the last thread has one
        torch.set_num_threads(threads)
        with in_form("c", "fold_and_multiply", "multiply"):
            results.append([*fold(bucket, by_rows), bucket.residual, *multiply(bucket, by_rows=False)])
    for others in results[1:]:
        assert all(ours.equal(theirs) for ours, theirs in zip(results[0], others, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_flushed_now_or_later_it_has_the_same_bits(form: str) -> None:
    """If it fails, a resume in other buckets is not exact: the residual is flushed first, not in the next fold."""
    for sides, r, by_rows in itertools.product(SIDES, RANKS, (True, False)):
        later, now = (Bucket(SIDES[sides], r, torch.float32) for _ in range(2))
        with in_form(form, "subtract_product", "fold_and_multiply"):
            low_rank.subtract_product(now.residual, now.parts, now.sent, now.residual, torch.tensor(True))
            now.sent = torch.zeros_like(now.sent[0]), torch.zeros_like(now.sent[1])
            assert all(map(torch.equal, fold(later, by_rows), fold(now, by_rows)))
        assert later.residual.equal(now.residual)


@over_cases()
def test_subtracting(form: str, sides: str, r: int, dtype: torch.dtype) -> None:
    """If it fails, what is kept is not what was not sent. Without another dtype, in place."""
    for out_dtype in (None, torch.float32, torch.bfloat16):
        bucket = Bucket(SIDES[sides], r, dtype)
        out = bucket.residual if out_dtype is None else bucket.flat.to(out_dtype)
        before, wanted = out.clone(), bucket.exact_residual()
        with in_form(form if out_dtype is None else "torch"):  # C has it in place only
            low_rank.subtract_product(bucket.residual, bucket.parts, bucket.sent, out, torch.tensor(False))
            assert out.equal(before)
            low_rank.subtract_product(bucket.residual, bucket.parts, bucket.sent, out, torch.tensor(True))
        for rest, exact in zip(bucket.exact(out), wanted, strict=True):
            assert_near(rest, exact, min(dtype, out.dtype, key=lambda x: x.itemsize))
        assert out[bucket.others].equal(before[bucket.others])


@over_cases(columns_in_c=low_rank.MAX_COLUMNS_ONE_BY_ONE)
def test_writing(form: str, sides: str, r: int, dtype: torch.dtype) -> None:
    """If it fails, the average is wrong, or a finite step changes the residual."""
    bucket = Bucket(SIDES[sides], r, dtype)
    flat, residual = bucket.flat.clone(), bucket.residual.clone()
    with in_form(form):
        low_rank.write_product(bucket.flat, bucket.residual, bucket.parts, bucket.factors, torch.tensor(True))
    for mean, (p, q) in zip(bucket.exact(bucket.flat), bucket.exact_factors(bucket.factors), strict=True):
        assert_near(mean, p.T @ q, dtype)
    assert bucket.flat[bucket.others].equal(flat[bucket.others])
    assert bucket.residual.equal(residual)


def test_all_ranks_write_the_same_bits() -> None:
    """If it fails, parameters drift apart between a host with a compiler and one without."""
    written = []
    for form in FORMS:
        buckets = [Bucket(sides, r, torch.float32) for sides, r in itertools.product(SIDES.values(), RANKS)]
        with in_form(form):
            for bucket in buckets:
                low_rank.write_product(bucket.flat, None, bucket.parts, bucket.factors, torch.tensor(True))
        written.append([bucket.flat for bucket in buckets])
    assert all(ours.equal(theirs) for ours, theirs in zip(*written, strict=True))
