"""The CUDA path with real torch, on a fake device that brings everything out of order that nothing keeps in order."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_device.build import Unavailable, libraries
from fake_device.ddp_jobs import PROGRAMS, run_ddp
from fake_device.device import FakeDevice, differences
from fake_device.diloco_jobs import run_diloco
from fake_device.fsdp_jobs import ShardedCase, run_sharded
from fake_device.halves import Halves
from fake_device.monitored_jobs import NUM_LAYERS, NUM_STEPS, fit_monitored
from fake_device.sensitivity import PROBES, run_probes

from lightning_commopt.compressors.blockwise import BlockInt8
from lightning_commopt.compressors.catalog import example_compressors
from lightning_commopt.compressors.sharded import ShardedBf16, ShardedInt4, ShardedInt8
from lightning_commopt.compressors.sharded_hierarchical import ShardedHierarchical
from lightning_commopt.measure.files import read_run
from lightning_commopt.measure.operations import OperationTotals, exposed_s
from lightning_commopt.plan import DiLoCoPlan
from support.cross_section import sampled

COMPRESSORS = {
    "none": None,
    **example_compressors(),
    "halves": Halves(),
}
ROOT = Path(__file__).parents[2]
SHARDED = {
    "none": ShardedCase(compressor=None),
    "bf16": ShardedCase(compressor=ShardedBf16()),
    "int8, gathered as int8": ShardedCase(compressor=ShardedInt8(error_feedback=True), gathers_int8=True),
    "int4 of bf16, gathered as int8": ShardedCase(compressor=ShardedInt4(), gathers_int8=True, precision="bf16"),
    "stochastic": ShardedCase(compressor=ShardedInt8(stochastic_rounding=True), precision="bf16", resharding=False),
    "hierarchical": ShardedCase(compressor=ShardedHierarchical(inner=ShardedInt8(error_feedback=True))),
    "from feedback to none": ShardedCase(compressor=ShardedInt8(error_feedback=True), later=(None,)),
    "from feedback to feedback": ShardedCase(
        compressor=ShardedInt8(error_feedback=True), later=(ShardedInt4(error_feedback=True),)
    ),
    "frozen": ShardedCase(compressor=ShardedInt8(error_feedback=True), freezes=True),
}
DILOCO = {
    "at once": DiLoCoPlan(sync_every=2),
    "overlapping": DiLoCoPlan(sync_every=3, fragments=2, overlap=2, comm_hook=BlockInt8()),
}

_LATE = ("--late", "0xffffffffffffffff")  # all streams work only when somebody waits for them
TESTS_ON_IT: dict[str, tuple[str, ...]] = {
    "tests/callbacks/test_comm_time.py": (),
    "tests/callbacks/test_prediction.py": (),
    "tests/strategy/test_apply_plan.py": _LATE,
    "tests/strategy/test_baselines.py::test_trains_as_ddp_bit_by_bit[unfrozen_in_training]": _LATE,
    "tests/strategy/test_diloco_resume.py": (),
    "tests/strategy/test_manual_backward.py": (),
    "tests/strategy/test_model_parallel_compressed.py": (),
    "tests/strategy/test_sharded_plan.py": (),
    "tests/tune/test_sharded_auto_plan.py": (),
    "tests/test_fabric_sharded.py": _LATE,
    "tests/test_fabric_sync.py": _LATE,
}

pytestmark = pytest.mark.exhaustive  # building the device takes longer than all of these


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


# Those that notice each wait that DDP can need. In plain torch, as here, compressors that keep a residual wait for the
# device in every bucket: with them less shows.
_SENSITIVE = [
    ("train", "hierarchical"),
    ("train", "halves"),
    ("change_plan_at_the_end", "halves"),
    ("change_plan_and_buckets", "halves"),
    ("resume", "halves"),
    ("resume_elsewhere", "halves"),
    ("resume_with_another_compressor", "halves"),
    ("break_off", "halves"),
    ("resume", "alternating_powersgd"),
]


def _grid() -> list[tuple[str, str]]:
    """Trains with all compressors, and has each of them in one other program besides."""
    others = [program for program in PROGRAMS if program != "train"]
    cases = [("train", name) for name in COMPRESSORS]
    cases += [(others[row % len(others)], name) for row, name in enumerate(COMPRESSORS)]
    return list(dict.fromkeys([*cases, *_SENSITIVE]))


@pytest.mark.parametrize(
    ("program", "name"), sampled(_grid(), by_default=[("train", "hierarchical"), ("train", "halves")])
)
def test_ddp_computes_the_same_in_every_order(device: FakeDevice, program: str, name: str) -> None:
    """If it fails, gradients or residuals are wrong now and then on a GPU, without any sign."""
    assert differences(device.run_ranks(run_ddp, COMPRESSORS[name], program)) == []


@pytest.mark.parametrize("name", sampled(SHARDED, by_default=["int8, gathered as int8"]))
def test_fsdp2_computes_the_same_in_every_order(device: FakeDevice, name: str) -> None:
    """If it fails, gradients, parameters or residuals are wrong now and then on a GPU, without any sign."""
    assert differences(device.run_ranks(run_sharded, SHARDED[name])) == []


@pytest.mark.parametrize("name", DILOCO)
def test_diloco_computes_the_same_in_every_order(device: FakeDevice, name: str) -> None:
    """If it fails, an exchange sends weights before the device has computed them, or overwrites them too early."""
    assert differences(device.run_ranks(run_diloco, DILOCO[name])) == []


@pytest.mark.parametrize("comm_hook", sampled([None, "int8"], by_default=[None]))
def test_fsdp2s_collectives_have_times(device: FakeDevice, comm_hook: str | None, tmp_path: Path) -> None:
    """If it fails, FSDP2's collectives have no times on CUDA, count twice, or nobody learns what waits for them."""
    device.run_ranks(fit_monitored, tmp_path, "fsdp2", comm_hook)
    source = "" if comm_hook is None else "int8 reduce-scatter"
    for rank in read_run(tmp_path):
        assert len(rank.steps) == NUM_STEPS
        for step in rank.steps:
            sharded = [one for one in step.collectives if one.phase in ("forward", "backward")]
            assert Counter((one.operation, one.phase, one.source) for one in sharded) == {
                ("all_gather", "forward", ""): NUM_LAYERS,
                ("all_gather", "backward", ""): NUM_LAYERS,
                ("reduce_scatter", "backward", source): NUM_LAYERS,
            }
            for one, waited_s in zip(step.collectives, exposed_s(step), strict=True):
                if one in sharded:
                    assert one.start_s is not None
                    assert one.end_s is not None
                    assert waited_s is not None
                    assert step.start_s <= one.start_s <= one.end_s <= step.end_s
                    assert 0 <= waited_s <= one.end_s - one.start_s + 1e-6
            assert all(step.start_s <= start_s <= end_s <= step.end_s for start_s, end_s in step.waits)
            assert step.waits
        totals = OperationTotals()
        totals.add(rank.steps)
        assert sum(one.exposed_s or 0.0 for one in totals.operations()) > 0


def test_backward_that_waits_for_the_host_is_recorded(device: FakeDevice, tmp_path: Path) -> None:
    """If it fails, steps on CUDA are recorded with gaps, or nobody learns that the host keeps the device waiting."""
    device.run_ranks(fit_monitored, tmp_path, "ddp", "int8")
    for rank in read_run(tmp_path):
        assert len(rank.steps) == NUM_STEPS
        for step in rank.steps:
            assert step.buckets
            assert step.waits == ()
            assert step.host_bound_s is not None
            assert 0 <= step.host_bound_s <= step.totals.backward_s


@pytest.mark.usefixtures("device")  # which skips where there is none
@pytest.mark.parametrize("tests", TESTS_ON_IT)
def test_what_is_tested_on_cpus_holds_on_cuda(tests: str) -> None:
    """If it fails, something is right only where the host and its device are one."""
    device = ["-m", "fake_device", "--for-cpu", *TESTS_ON_IT[tests]]
    command = [sys.executable, *device, sys.executable, "-m", "pytest", "-n0", "-q", tests]
    paths = os.pathsep.join([str(ROOT / "tests/streams"), *sys.path])
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=400
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
