"""Buckets that are averaged piece by piece."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compressors import Compressor, ErrorFeedback, Int8, Rounds, base
from lightning_commopt.compressors.base import in_pieces
from lightning_commopt.compressors.channel import Pending
from lightning_commopt.measure.clock import HostClock
from lightning_commopt.measure.observer import Observers
from lightning_commopt.measure.recorder import StepRecorder
from lightning_commopt.sync.ddp.attach import attach_bucket_hook
from support.every_compressor import BF16, BF16_IN_FLOAT32
from support.warm_ranks import run_ranks

SUMMED_ON_THE_WAY: dict[str, Compressor] = {"bf16": BF16, "bf16_feedback": ErrorFeedback(inner=BF16)}
SUMMED_BY_US: dict[str, Compressor] = {
    "bf16_in_float32": ErrorFeedback(inner=BF16_IN_FLOAT32),
    "int8": Int8(block_size=16),
    "int8_without_feedback": Int8(block_size=16, error_feedback=False),
}
NUMEL, NUM_STEPS = 1000, 3


class _Log:
    """A channel whose collectives write down when they begin and when somebody waits for them."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def lanes(self) -> tuple[Any, Any]:
        return self, self


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "PIECE_NUMEL", 4)


def _rounds(flat: Tensor, residual: Tensor | None, log: Any) -> Rounds:
    piece = int(flat[0]) // 4
    for collective in "ab":
        log.lines.append(f"start {piece}{collective}")
        yield Pending(flat, [])
        log.lines.append(f"use {piece}{collective}")


@pytest.mark.usefixtures("small_pieces")
def test_two_pieces_are_under_way_in_an_order_that_depends_on_nothing() -> None:
    """If it fails, the wire is idle while a piece is calculated, or ranks pair messages of different pieces."""
    log: Any = _Log()
    for pending in in_pieces(torch.arange(10.0), None, log, 1, _rounds):
        log.lines.append("wait, others under way" if pending.is_followed else "wait")
    assert log.lines == [
        *("start 0a", "start 1a", "wait, others under way"),
        *("use 0a", "start 0b", "wait, others under way"),
        *("use 1a", "start 1b", "wait, others under way"),
        *("use 0b", "start 2a", "wait, others under way"),
        *("use 1b", "wait"),
        *("use 2a", "start 2b", "wait", "use 2b"),
    ]


class _Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(NUMEL))

    def forward(self, gradients: Tensor) -> Tensor:
        return (self.vector * gradients).sum()


def _outcome(compressor: Compressor) -> dict[str, Any]:
    model = DistributedDataParallel(_Vector())
    recorder, observers = StepRecorder(HostClock()), Observers()
    observers.add(recorder)
    hook = attach_bucket_hook(model, compressor, None, observers=observers)
    generator, received = torch.Generator().manual_seed(dist.get_rank()), []
    for step in range(NUM_STEPS):
        gradients = torch.randn(NUMEL, generator=generator)
        if step == 1 and dist.get_rank() == 0:
            gradients[NUMEL // 2] = torch.inf
        model.zero_grad()
        recorder.enter("backward")
        model(gradients).backward()
        recorder.end_step(step, 1)
        received.append(model.module.vector.grad.clone())
    wire = recorder.take(NUM_STEPS)[-1].buckets[0].wire
    num_bytes = hook.bytes_sent
    residual = hook.close().get("vector", torch.zeros(NUMEL))
    dist.all_reduce(residual)
    return {"received": torch.stack(received).numpy(), "residual": residual.numpy(), "bytes": num_bytes, "wire": wire}


def _whole_and_in_pieces(compressors: dict[str, Compressor]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    outcomes = {}
    for name, compressor in compressors.items():
        whole = _outcome(compressor)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(base, "PIECE_NUMEL", 200)
            outcomes[name] = whole, _outcome(compressor)
    return outcomes


# More than two numbers that a collective sums have other roundings at other places in a message.
@pytest.mark.parametrize(("world_size", "compressors"), [(2, SUMMED_ON_THE_WAY | SUMMED_BY_US), (3, SUMMED_BY_US)])
def test_pieces_change_nothing(world_size: int, compressors: dict[str, Compressor]) -> None:
    """If it fails, messages of different pieces are mixed up, or large buckets train differently from small ones."""
    for of_rank in run_ranks(_whole_and_in_pieces, compressors, world_size=world_size):
        for name, (whole, cut) in of_rank.items():
            np.testing.assert_array_equal(cut["received"][0], whole["received"][0], err_msg=name)
            assert cut["bytes"] == whole["bytes"], name
            assert len(cut["wire"]) <= 2, name  # the last piece of an odd number is by itself
            assert np.isfinite(cut["residual"]).all(), name
            np.testing.assert_allclose(cut["received"][2], whole["received"][2], atol=0.05, err_msg=name)
