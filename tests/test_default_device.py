"""Scripts that make every tensor on a device by default, as after ``torch.set_default_device("cuda")``.

Here the default device is "meta", whose tensors have no values: what lands there by mistake is of no use.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_commopt.callbacks.publisher import AllRanks
from lightning_commopt.compressors.base import Layout
from lightning_commopt.sync.warm_up import run_alone
from support.every_compressor import COMPRESSORS

ALONE: Any = SimpleNamespace(size=1, rank=0, within=None, across=None)
CHANNEL: Any = SimpleNamespace(size=1, rank=0, within=ALONE, across=ALONE)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_compressors_work_on_the_device_of_the_gradients(name: str) -> None:
    """If it fails, a comm hook raises in such scripts, or compresses tensors without values."""
    parameters = [torch.ones(40, 33), torch.ones(7)]
    layout = Layout.of(parameters, torch.float32)
    flat = torch.randn(layout.numel)
    average = flat.clone()
    with torch.device("meta"):
        run_alone(COMPRESSORS[name], layout, average, CHANNEL)
    assert average.device.type == "cpu"
    assert torch.isfinite(average).all()
    assert float(torch.dot(average, flat)) > 0


def test_times_are_gathered_on_the_host() -> None:
    with torch.device("meta"):
        ranks = AllRanks(None, (2, 3))
        ranks.send(torch.ones(2, 3, dtype=torch.float64, device="cpu"))
    gathered = ranks.take()
    assert gathered is not None
    assert gathered.sum() == 6
