"""The CUDA path with real torch, on a fake device that brings everything out of order that nothing keeps in order."""

from collections.abc import Iterator

import pytest
from fake_device.build import Unavailable, libraries
from fake_device.ddp_jobs import PROGRAMS, run_ddp
from fake_device.device import FakeDevice, differences
from fake_device.fsdp_jobs import ShardedCase, run_sharded
from fake_device.sensitivity import PROBES, run_probes

from lightning_commopt.compressors.catalog import example_compressors
from lightning_commopt.compressors.sharded import ShardedBf16, ShardedInt4, ShardedInt8
from lightning_commopt.compressors.sharded_hierarchical import ShardedHierarchical
from support.cross_section import sampled

COMPRESSORS = {"none": None, **example_compressors()}
SHARDED = {
    "none": ShardedCase(compressor=None),
    "bf16": ShardedCase(compressor=ShardedBf16()),
    "int8, gathered as int8": ShardedCase(compressor=ShardedInt8(error_feedback=True), gathers_int8=True),
    "int4 of bf16, gathered as int8": ShardedCase(compressor=ShardedInt4(), gathers_int8=True, precision="bf16"),
    "stochastic": ShardedCase(compressor=ShardedInt8(stochastic_rounding=True), precision="bf16", resharding=False),
    "hierarchical": ShardedCase(compressor=ShardedHierarchical(inner=ShardedInt8(error_feedback=True))),
}


@pytest.fixture(scope="module")
def device() -> Iterator[FakeDevice]:
    try:
        built = libraries()
    except Unavailable as reason:
        pytest.skip(str(reason))
    device = FakeDevice(built)
    yield device
    device.close()


def test_what_is_not_in_order_shows(device: FakeDevice) -> None:
    """If it fails, the tests below are blind."""
    assert device.run_ranks(run_probes) == [dict.fromkeys(PROBES, (True, False))] * 2


# One of each kind that differs in what it launches: in one round, in several, over several groups. In plain torch, as
# here, most compressors that round to integers wait for the device in every bucket: with them less shows.
_BY_DEFAULT = [
    ("train", "hierarchical"),
    ("change_plan", "powersgd"),
    ("resume", "alternating_powersgd"),
    ("resume_elsewhere", "powersgd"),
    ("resume_with_another_compressor", "error_feedback"),
    ("break_off", "error_feedback"),
]


def _grid() -> list[tuple[str, str]]:
    """Trains with all compressors, and has each of them in one other program besides."""
    others = [program for program in PROGRAMS if program != "train"]
    cases = [("train", name) for name in COMPRESSORS]
    cases += [(others[row % len(others)], name) for row, name in enumerate(COMPRESSORS)]
    return list(dict.fromkeys([*cases, *_BY_DEFAULT]))


@pytest.mark.parametrize(("program", "name"), sampled(_grid(), by_default=_BY_DEFAULT))
def test_ddp_computes_the_same_in_every_order(device: FakeDevice, program: str, name: str) -> None:
    """If it fails, gradients or residuals are wrong now and then on a GPU, without any sign."""
    assert differences(device.run_ranks(run_ddp, COMPRESSORS[name], program)) == []


@pytest.mark.parametrize("name", sampled(SHARDED, by_default=["int8, gathered as int8"]))
def test_fsdp2_computes_the_same_in_every_order(device: FakeDevice, name: str) -> None:
    """If it fails, gradients, parameters or residuals are wrong now and then on a GPU, without any sign."""
    assert differences(device.run_ranks(run_sharded, SHARDED[name])) == []
