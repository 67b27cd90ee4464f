"""What holds for low-rank compressors only."""

import math
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compressors import AlternatingLowRank, AlternatingPowerSGD, Compressor, Layout, PowerSGD
from lightning_commopt.compressors.base import finish
from lightning_commopt.compressors.channel import AloneChannel
from lightning_commopt.sync.ddp.attach import attach_bucket_hook
from support.default_dtype import default_dtype
from support.ranks import run_ranks

NUM_STEPS = 100
NUM_STEPS_ELSEWHERE = 6
LEARNING_RATE = 0.1


def _descend(compressor: Compressor) -> float:
    """Returns how far gradient descent on a matrix is from its minimum, when the gradient's subspace changes once.

    A quadratic function of one entry, 1 away from its minimum. In the first steps the gradient is in another entry:
    the power iteration's subspace becomes exactly that entry's, and stays orthogonal to all that comes after.
    """
    model = DistributedDataParallel(nn.Linear(16, 16, bias=False))
    hook = attach_bucket_hook(model, compressor, None)
    weight = model.module.weight
    with torch.no_grad():
        weight.zero_()[0, 0] = 1.0
    model.module.forward = lambda: _Scalar.loss
    for step in range(NUM_STEPS):
        _Scalar.loss = weight[1, 1] if step < NUM_STEPS_ELSEWHERE else 0.5 * weight[0, 0] ** 2
        model.zero_grad()
        model().backward()
        with torch.no_grad():
            weight[0, 0] -= LEARNING_RATE * weight.grad[0, 0]
    hook.close()
    return abs(weight[0, 0].item())


def _descend_both(cls: type) -> tuple[float, float]:
    return _descend(cls()), _descend(cls(refresh_steps=8))


class _Scalar:
    loss: Tensor


@pytest.mark.exhaustive
@pytest.mark.parametrize("cls", [PowerSGD, AlternatingPowerSGD])
def test_refreshing_the_subspace_lets_it_converge(cls: type) -> None:
    """If it fails, refresh_steps does not cure what keeps PowerSGD from converging (PowerSGD+, arXiv 2509.11254)."""
    without, cured = run_ranks(_descend_both, cls)[0]
    assert cured < 0.01
    if cls is PowerSGD:
        assert without == 1


@pytest.mark.parametrize("cls", [PowerSGD, AlternatingPowerSGD])
def test_a_rank_above_the_matrix_is_said_once(cls: type) -> None:
    """If it fails, a user does not learn that matrix_rank is clamped, or is told so for every bucket."""
    layout = Layout.of([torch.empty(6, 40), torch.empty(4, 40)], torch.float32)
    compressor = cls(matrix_rank=7 if cls is PowerSGD else 9)
    with pytest.warns(UserWarning, match="matrix_rank=[79] is larger than the shorter side of some matrices"):
        compressor.init(layout, torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compressor.init(layout, torch.device("cpu"))


@pytest.mark.parametrize("name", ["q", "p"])
def test_every_refresh_draws_other_factors_the_same_on_all_ranks(name: str) -> None:
    """If it fails, a refreshed iteration starts in the same subspace again, or ranks start in different ones."""
    compressor = AlternatingLowRank(matrix_rank=2)
    layout = Layout.of([torch.empty(40, 33)], torch.float32)
    first, again, later = (compressor.init(layout, torch.device("cpu"), step)[name] for step in (0, 0, 8))
    assert first.equal(again)
    assert not first.equal(later)


@pytest.mark.parametrize(("sides", "is_compressed"), [((8, 8), False), ((9, 8), True)])
def test_matrices_that_factors_do_not_make_smaller_travel_as_they_are(
    sides: tuple[int, int], is_compressed: bool
) -> None:
    """Factors of rank 2 have ``2 * (m + k)`` elements; with ``min_compression_rate=2`` matrices need twice as many."""
    layout = Layout.of([torch.zeros(sides)], torch.float32)
    numel = 2 * sum(sides) if is_compressed else layout.numel
    assert PowerSGD(matrix_rank=2, min_compression_rate=2).wire_bytes(layout, 2) == 4 * numel


@pytest.mark.parametrize("cls", [PowerSGD, AlternatingPowerSGD])
def test_first_factors_do_not_depend_on_the_default_dtype(cls: type) -> None:
    """If it fails, training in 16 bits ends with an error, as no QR decomposition of these numbers exists."""
    layout, drawn = Layout.of([torch.empty(64, 48)], torch.bfloat16), []
    for dtype in (torch.float32, torch.bfloat16):
        with default_dtype(dtype):
            drawn.append(cls(matrix_rank=2).init(layout, torch.device("cpu"))["inner"]["inner"])
    torch.testing.assert_close(drawn[1], drawn[0], rtol=0, atol=0)


@pytest.mark.parametrize("compressor", [PowerSGD(), AlternatingPowerSGD()])
def test_asking_for_the_residual_changes_no_later_step(compressor: Compressor) -> None:
    """If it fails, training goes on with another residual or subspace after a checkpoint or a change of the plan."""
    layout, received = Layout.of([torch.empty(40, 33), torch.empty(7)], torch.float32), []
    for is_asked in (False, True):
        state, generator = compressor.init(layout, torch.device("cpu")), torch.Generator().manual_seed(0)
        for step in range(5):
            flat = torch.randn(layout.numel, generator=generator)
            flat[0] = math.inf if step == 1 else flat[0]
            finish(compressor.rounds(flat, layout, state, AloneChannel(2)))
            received.append(flat)
            for _ in range(2 if is_asked else 0):
                residual = compressor.residual(layout, state)
                assert residual is not None
                received.append(residual.clone())
    through, (first, *asked) = received[:5], received[5:]
    torch.testing.assert_close(torch.stack([first, *asked[2::3]]), torch.stack(through), equal_nan=True)
    torch.testing.assert_close(torch.stack(asked[::3]), torch.stack(asked[1::3]), rtol=0, atol=0)
