"""The simulated device finds the faults that it is there for, in programs of a few lines."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_commopt.compressors.channel import Channel
from lightning_commopt.compressors.kernels import (
    blockwise_triton,
    elementwise_triton,
    factors_triton,
    low_rank_triton,
)
from support.fake_cuda import DEVICE, cuda_on, written_by
from support.machine import Machine


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine()
    with cuda_on(machine):
        yield machine


def other_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream(DEVICE)


def ones(numel: int = 8) -> Tensor:
    return torch.ones(numel, device=DEVICE)


def test_reading_what_another_stream_writes_is_a_race(machine: Machine) -> None:
    x, side = ones(), other_stream()
    with torch.cuda.stream(side):
        x.mul(2)
    (found,) = machine.findings
    assert "'side 1' reads at" in found
    assert "'main' may not have written yet" in found


def test_writing_what_another_stream_reads_is_a_race(machine: Machine) -> None:
    x, side = ones(), other_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x.mul(2)
    x.zero_()
    assert "'main' writes at [] what 'side 1' may still use" in next(iter(machine.findings))
    torch.cuda.current_stream().wait_stream(side)
    machine.findings.clear()
    x.zero_()
    y.zero_()
    assert not machine.findings


def hand_over(machine: Machine, protect: Callable[[Tensor, torch.cuda.Stream], None]) -> int:
    """Frees memory of the main stream while a side stream may still read it; returns what was found."""
    x, side = ones(), other_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul(2)
    protect(x, side)
    del x
    ones()
    return len(machine.findings)


def test_memory_that_another_stream_uses_is_not_to_be_freed(machine: Machine) -> None:
    assert hand_over(machine, lambda x, side: None) == 1
    assert "memory of 'main'" in next(iter(machine.findings))


def test_memory_may_be_freed_once_it_is_recorded(machine: Machine) -> None:
    assert hand_over(machine, lambda x, side: x.record_stream(side)) == 0


def test_memory_may_be_freed_once_its_stream_has_waited(machine: Machine) -> None:
    assert hand_over(machine, lambda x, side: torch.cuda.current_stream().wait_stream(side)) == 0


def test_memory_may_be_freed_once_the_host_has_waited(machine: Machine) -> None:
    assert hand_over(machine, lambda x, side: torch.cuda.synchronize()) == 0


def test_a_collective_is_waited_for(machine: Machine) -> None:
    channel = Channel("all")  # type: ignore[arg-type]
    x = ones()
    pending = channel.all_reduce(x)
    y = x + 1
    (found,) = machine.findings
    assert "'main' reads at" in found
    machine.findings.clear()
    pending.wait()
    y.add_(x)
    assert not machine.findings


def test_reads_of_the_host_are_counted(machine: Machine) -> None:
    x = ones()
    torch.tensor([1, 2, 3]).to(DEVICE, non_blocking=True)
    x.mul_(2.0)
    assert not machine.host_waits
    torch.tensor([1, 2, 3]).to(DEVICE)
    x.cpu()
    assert len(machine.host_waits) == 2


def test_kernels_write_what_they_store_to() -> None:
    """If it fails, the checker takes an output for an input, and sees no race over it."""

    def pointers(kernel: Any) -> set[str]:
        return {name for name in written_by(kernel) if name.islower() and not name.startswith("num")}

    assert pointers(elementwise_triton._widen) == {"flat", "residual"}
    assert pointers(low_rank_triton._compress) == {"bucket", "residual", "partials", "message"}
    assert pointers(blockwise_triton._reduce) == {"mean_message", "residual"}
    assert pointers(factors_triton._apply) == {"basis", "sums"}
