"""The CUDA path with real torch, on a fake device that brings everything out of order that nothing keeps in order."""

from collections.abc import Iterator

import pytest

from fake_device.build import Unavailable, libraries
from fake_device.ddp_jobs import PROGRAMS, digests
from fake_device.device import FakeDevice, differences
from lightning_commopt.compressors.catalog import example_compressors
from support.cross_section import sampled

COMPRESSORS = {"none": None, **example_compressors()}
# One of each kind that differs in what it launches: in one round, in several, over several groups.
_BY_DEFAULT = [("train", "hierarchical"), ("change_plan", "powersgd"), ("resume", "alternating_powersgd")]


@pytest.fixture(scope="module")
def device() -> Iterator[FakeDevice]:
    try:
        built = libraries()
    except Unavailable as reason:
        pytest.skip(str(reason))
    device = FakeDevice(built)
    yield device
    device.close()


@pytest.mark.parametrize(
    ("program", "name"),
    sampled([(program, name) for program in PROGRAMS for name in COMPRESSORS], by_default=_BY_DEFAULT),
)
def test_ddp_computes_the_same_in_every_order(device: FakeDevice, program: str, name: str) -> None:
    """If it fails, gradients or residuals are wrong now and then on a GPU, without any sign."""
    found = device.run_ranks(digests, COMPRESSORS[name], program)
    assert differences(found) == []
