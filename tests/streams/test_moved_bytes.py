"""What the simulated device counts for a launch: what a kernel reads and what it writes, once each."""

from typing import Any

import pytest
import torch

from lightning_commopt.compressors import AllReduce, Compressor, Int4
from support.ddp_steps import Training
from support.fake_cuda import DEVICE, cuda_on, needs_fake_copies
from support.machine import Machine


@pytest.mark.parametrize(
    ("operation", "num_bytes"),
    [
        (lambda x, y: torch.empty_like(x), None),
        (lambda x, y: x.add_(1), 64),
        (lambda x, y: x.add_(y), 96),
        (lambda x, y: x + x, 64),
        (lambda x, y: torch.mul(x, 2, out=y), 64),
        (lambda x, y: x.copy_(y), 64),
        (lambda x, y: x.zero_(), 32),
        (lambda x, y: torch._foreach_copy_([x], [y]), 64),
    ],
)
def test_operations_of_torch(operation: Any, num_bytes: int | None) -> None:
    machine = Machine()
    with cuda_on(machine):
        x, y = torch.ones(8, device=DEVICE), torch.ones(8, device=DEVICE)
        before = len(machine.launches)
        operation(x, y)
        assert [launch.num_bytes for launch in machine.launches[before:]] == ([] if num_bytes is None else [num_bytes])


@needs_fake_copies
@pytest.mark.parametrize(
    ("compressor", "bytes_per_element"),
    [
        (AllReduce(), 8),  # scaled in place
        (Int4(), 4 + 4 + 4.5 / 8 * (1 + 1 + 1 / 8 + 1)),  # codes: encoded, averaged, of the average, decoded
    ],
)
def test_a_bucket(compressor: Compressor, bytes_per_element: float) -> None:
    """Codes of int4 with their scales take 4.5 bits for each element; a rank averages an eighth of the elements."""
    machine = Machine()
    with cuda_on(machine, world_size=8):
        training = Training(machine, compressor, shapes=[(1024, 1024)], buckets=[[0]], num_streams=1)
        training.run(2)
        before = len(machine.launches)
        training.sync(0).wait()
    moved = sum(launch.num_bytes for launch in machine.launches[before:] if not launch.stream.startswith("nccl"))
    assert moved / 2**20 == pytest.approx(bytes_per_element, rel=0.01)
