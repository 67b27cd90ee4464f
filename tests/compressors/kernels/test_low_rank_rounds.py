"""What is done to a bucket before and after a collective: against the matrices themselves, and that its forms agree."""

import itertools

import pytest
import torch
from forms import in_form, main, needs_cuda, needs_triton, run_interpreted
from torch import Tensor

from lightning_commopt.compressors.kernels import low_rank
from lightning_commopt.compressors.kernels.factors import Matrix, Parts, factors_numel, views

Sides = list[tuple[int, int]]
SIDES: dict[str, Sides] = {
    "one": [(9, 13)],
    "many": [(40, 130), (8, 9), (2, 3), (257, 33)],
    "aligned": [(300, 32), (40, 260)],
    "shifted": [(6, 32)],  # of its rows only the length is a multiple of 4
}
# A side has more tiles than are added up at once; the rest has two chunks.
MANY_TILES: list[Sides] = [[(8, 4099), (2, 3)], [(4400, 8), (5, 7)]]
SCALE = 1 / 3
RESIDUALS = [None, torch.float32, torch.bfloat16]


class Bucket:
    """Matrices with a rest before, between and behind them, a residual, and random factors of all of them."""

    def __init__(self, sides: Sides, r: int, dtype: torch.dtype, residual_dtype: torch.dtype | None) -> None:
        gap = 4 if sides == SIDES["aligned"] else 3
        ends = list(itertools.accumulate((m * k + gap for m, k in sides), initial=gap))
        matrices = tuple(Matrix(start, m, k, min(r, m, k)) for start, (m, k) in zip(ends, sides, strict=False))
        starts = [0, *(matrix.start + matrix.m * matrix.k for matrix in matrices)]
        self.parts = Parts(matrices, (*((start, start + gap) for start in starts[:-1]), (starts[-1], ends[-1] + 3000)))
        generator = torch.Generator().manual_seed(len(sides) + r)

        def random(numel: int) -> Tensor:
            return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)

        numel = ends[-1] + 3000
        self.flat, residual = random(numel), random(numel)
        if residual_dtype == torch.float32:
            residual_dtype = dtype
        self.residual = None if residual_dtype is None else residual.to(residual_dtype)
        num_p, num_q = (factors_numel(shapes) for shapes in (self.parts.p_shapes, self.parts.q_shapes))
        self.sent = random(num_p), random(num_q)
        self.factors = random(num_p), random(num_q)

    def to(self, device: str) -> "Bucket":
        self.flat = self.flat.to(device)
        self.residual = None if self.residual is None else self.residual.to(device)
        self.sent, self.factors = ((p.to(device), q.to(device)) for p, q in (self.sent, self.factors))
        return self

    def compress(self, by_rows: bool, with_own: bool) -> tuple[Tensor, Tensor | None]:
        """Returns the message, and the products that are not scaled."""
        folds = low_rank.holds_sums(self.residual, self.flat)
        p, q = self.factors
        factor, product = (q, p) if by_rows else (p, q)
        message = product.new_full((len(product) + sum(self.parts.rest_numels),), torch.nan)
        own, sent = product.clone().fill_(torch.nan) if with_own else None, self.sent if folds else None
        given = (self.flat, self.residual, self.parts, sent, factor, message, own, SCALE, by_rows)
        low_rank.compress(*given)
        return message, own

    def decompress(self, finite: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the factors of what was sent."""
        p, q = self.factors
        own, message = (p.clone(), q.clone()), torch.cat([q, q.new_ones(sum(self.parts.rest_numels))])
        low_rank.decompress(self.flat, self.residual, self.parts, own, (p, q), message, finite)
        return own


@pytest.mark.parametrize("residual_dtype", RESIDUALS)
@pytest.mark.parametrize("by_rows", [True, False])
def test_a_message_holds_products_and_rest(by_rows: bool, residual_dtype: torch.dtype | None) -> None:
    """If it fails, ranks average something else than gradients plus residuals."""
    for with_own in (True, False):
        bucket = Bucket(SIDES["many"], 2, torch.float32, residual_dtype)
        flat, parts = bucket.flat.clone(), bucket.parts
        residual = torch.zeros_like(flat) if bucket.residual is None else bucket.residual.float().clone()
        if bucket.residual is not None and residual_dtype == torch.float32:
            low_rank.subtract_product(residual, parts, bucket.sent, residual, torch.tensor(True))
        message, own = bucket.compress(by_rows, with_own)
        sums, (p, q) = (
            flat + residual,
            (views(x, s) for x, s in zip(bucket.factors, (parts.p_shapes, parts.q_shapes), strict=True)),
        )
        wanted = [
            its_q @ matrix.of(sums).T if by_rows else its_p @ matrix.of(sums)
            for matrix, its_p, its_q in zip(parts.matrices, p, q, strict=True)
        ]
        products, rest = torch.cat([x.flatten() for x in wanted]), torch.cat(parts.rest_of(sums))
        torch.testing.assert_close(message, SCALE * torch.cat([products, rest]), rtol=1e-5, atol=1e-4)
        if own is not None:
            torch.testing.assert_close(own, products, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("residual_dtype", RESIDUALS)
def test_an_average_is_written_and_the_rest_of_the_residual_is_sent(residual_dtype: torch.dtype | None) -> None:
    """If it fails, the average is wrong, or what was sent as it is will be sent again."""
    bucket = Bucket(SIDES["many"], 2, torch.float32, residual_dtype)
    parts, before = bucket.parts, None if bucket.residual is None else bucket.residual.clone()
    own = bucket.decompress(torch.tensor(True))
    assert own[0].equal(bucket.factors[0])
    assert own[1].equal(bucket.factors[1])
    assert torch.cat(parts.rest_of(bucket.flat)).equal(torch.ones(sum(parts.rest_numels)))
    for matrix, p, q in zip(parts.matrices, views(own[0], parts.p_shapes), views(own[1], parts.q_shapes), strict=True):
        torch.testing.assert_close(matrix.of(bucket.flat), p.T @ q)
        if residual_dtype == torch.float32 and bucket.residual is not None and before is not None:
            assert matrix.of(bucket.residual).equal(matrix.of(before))
    if bucket.residual is not None:
        assert not torch.cat(parts.rest_of(bucket.residual)).any()


@pytest.mark.parametrize("finite", [torch.tensor(False), torch.tensor([True, False])])
@pytest.mark.parametrize("residual_dtype", RESIDUALS[1:])
def test_a_step_that_is_not_finite_leaves_the_residual(residual_dtype: torch.dtype, finite: Tensor) -> None:
    """If it fails, an overflow outlives its step."""
    bucket = Bucket(SIDES["many"], 2, torch.float32, residual_dtype)
    parts, residual = bucket.parts, bucket.residual
    assert residual is not None
    before = residual.clone()
    own = bucket.decompress(finite)
    assert torch.cat(parts.rest_of(residual)).equal(torch.cat(parts.rest_of(before)))
    assert all(matrix.of(bucket.flat).isnan().all() for matrix in parts.matrices)
    if residual_dtype == torch.float32:
        assert not own[0].any()
        assert not own[1].any()
    else:
        assert residual.equal(before)


def results(
    device: str, sides: Sides, r: int, dtype: torch.dtype, residual_dtype: torch.dtype | None, finite: bool
) -> list[Tensor]:
    """Everything that the operations write."""
    written: list[Tensor | None] = []
    for by_rows, with_own in ((True, False), (False, True), (True, True)):
        bucket = Bucket(sides, r, dtype, residual_dtype).to(device)
        if not finite:
            bucket.flat[bucket.parts.matrices[-1].start] = torch.inf
        written += [*bucket.compress(by_rows, with_own), bucket.flat, bucket.residual]
        written = [None if x is None else x.clone() for x in written]
        flags = torch.ones(140, dtype=torch.bool, device=device)
        flags[-1] = finite
        written += [*bucket.decompress(flags), bucket.flat, bucket.residual]
    if bucket.residual is not None:
        flag = torch.tensor(finite, device=device)
        low_rank.subtract_product(bucket.flat, bucket.parts, bucket.sent, bucket.residual, flag)
        written.append(bucket.residual)
    return [x.cpu() for x in written if x is not None]


def both_forms_agree(device: str) -> None:
    """The interpreter cuts bfloat16 off where devices round to nearest, and is slow: it gets some of the cases."""
    for sides in MANY_TILES:
        compare(device, 1e-4, 1e-2, sides, 2, torch.float32, torch.float32, True)
    compare(device, 1e-5, 1e-4, SIDES["many"], 2, torch.float32, torch.float32, False)
    for name, sides in SIDES.items():
        dtypes = (torch.float32, torch.float64)
        ranks = (1, 2, 3, 5, 8) if name == "many" else (2,)
        cases = list(itertools.product(ranks, dtypes, RESIDUALS, (True, False)))
        for case in cases[:: 37 if device == "cpu" else 1]:
            compare(device, 1e-5, 1e-4, sides, *case)


def compare(device: str, rtol: float, atol: float, *case: object) -> None:
    with in_form("torch"):
        plain = results("cpu", *case)  # type: ignore[arg-type]
    with in_form("triton"):
        by_triton = results(device, *case)  # type: ignore[arg-type]
    for ours, theirs in zip(by_triton, plain, strict=True):
        its_rtol = 2.0**-6 if theirs.dtype == torch.bfloat16 else rtol
        torch.testing.assert_close(ours, theirs, rtol=its_rtol, atol=atol, equal_nan=True)


@pytest.mark.exhaustive  # interpretation is slow
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
    with in_form("triton"):
        first, *others = (results("cuda", sides, 4, torch.float32, torch.float32, True) for _ in range(4))
    for other in others:
        assert all(a.equal(b) for a, b in zip(first, other, strict=True))


if __name__ == "__main__":
    main(both_forms_agree)
