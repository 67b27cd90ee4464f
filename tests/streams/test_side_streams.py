"""Gradient sync on CUDA, on a simulated device: no race, no memory freed too early, no wait of the host.

The hook is attached as in training: it decides how many streams there are.

What is launched does not depend on values: steps that overflow launch the same.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from torch import Tensor

from lightning_commopt.compressors import (
    AfterSteps,
    AlternatingPowerSGD,
    BySize,
    Compressor,
    ErrorFeedback,
    Hierarchical,
    Int8,
    Layout,
    PowerSGD,
    Rounds,
    State,
)
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.sync.ddp.hook import GradientSyncError
from support.cross_section import sampled
from support.ddp_steps import BUCKETS, FIRST_BUCKETS, OTHER_BUCKETS, Training
from support.every_compressor import COMPRESSORS
from support.fake_cuda import cuda_on, needs_fake_copies
from support.machine import Machine
from support.own_compressors import Averages

pytestmark = needs_fake_copies
BF16 = COMPRESSORS["bf16"]
CASES: dict[str, Compressor] = {
    **COMPRESSORS,
    "powersgd_rank_4": PowerSGD(matrix_rank=4, min_compression_rate=1.0),
    "powersgd_refreshed_often": PowerSGD(matrix_rank=2, refresh_steps=2),
    "alternating_rank_4": AlternatingPowerSGD(matrix_rank=4, min_compression_rate=1.0),
    "by_size_of_feedback": BySize(inner=ErrorFeedback(inner=BF16), min_numel=2000),
    "feedback_of_by_size_low_rank": BySize(inner=PowerSGD(matrix_rank=2), min_numel=2000),
    "hierarchical_feedback": Hierarchical(inner=ErrorFeedback(inner=BF16)),
    "hierarchical_alternating": Hierarchical(inner=AlternatingPowerSGD()),
    "by_size_of_hierarchical": BySize(inner=Hierarchical(inner=BF16), min_numel=2000),  # three communicators
    "late_int8": AfterSteps(inner=Int8(), start_step=2),
}
del CASES["example_topk"]  # it decides on the host, where FakeTensors have no values


def steps(training: Training) -> None:
    training.run(2)
    training.lay_out(BUCKETS)
    training.run(3)


def lay_out_often(training: Training) -> None:
    for buckets in (BUCKETS, OTHER_BUCKETS, BUCKETS):
        training.run(2)
        training.lay_out(buckets)
    training.run(2)


def resume(training: Training) -> None:
    steps(training)
    state = training.checkpoint()
    training.run(1)
    training.resume(state)
    training.run(3)


def resume_in_first_buckets(training: Training) -> None:
    steps(training)
    training.resume(training.checkpoint())
    training.lay_out(FIRST_BUCKETS)
    training.run(2)
    training.lay_out(BUCKETS)
    training.run(3)


def resume_elsewhere(training: Training) -> None:
    """DDP never has the buckets of the checkpoint."""
    steps(training)
    training.resume(training.checkpoint())
    training.lay_out(FIRST_BUCKETS)
    training.run(6)


def resume_with_a_frozen_parameter(training: Training) -> None:
    """DDP has no bucket with the gradients of the first one in the checkpoint."""
    steps(training)
    training.resume(training.checkpoint())
    training.lay_out((BUCKETS[0][:1], *BUCKETS[1:]))
    training.run(2)


def resume_with_another_compressor(training: Training) -> None:
    """Only the residuals go on: from the device's memory where a model is wrapped again, and from the host's."""
    steps(training)
    training.resume(training.hook.state(), Int8(block_size=64))
    training.run(3)
    training.resume(training.checkpoint(), Int8(block_size=32))
    training.run(3)


def change_plan(training: Training) -> None:
    steps(training)
    training.change_plan(COMPRESSORS["int8"])
    training.run(3)
    training.change_plan(COMPRESSORS["all_reduce"])
    training.run(3)


def change_plan_after_a_failure(training: Training) -> None:
    """The user's code raised in a backward and goes on."""
    steps(training)
    training.break_off()
    training.change_plan(COMPRESSORS["int8"])
    training.run(2)


SCENARIOS: dict[str, Callable[[Training], None]] = {
    each.__name__: each
    for each in (
        *(steps, lay_out_often, resume, resume_in_first_buckets, resume_elsewhere, resume_with_a_frozen_parameter),
        *(resume_with_another_compressor, change_plan, change_plan_after_a_failure),
    )
}


def findings(name: str, scenario: str, apart: bool, without: str | None = None) -> Machine:
    """Runs a scenario; the machine then has what was found."""
    machine = Machine(without)
    with warnings.catch_warnings(), cuda_on(machine):
        warnings.simplefilter("ignore")  # of compressors that are made for a test
        SCENARIOS[scenario](Training(machine, CASES[name], apart))
    return machine


# With each wait that is left out there is a finding in one of them.
SENSITIVE = [
    ("powersgd_rank_2", "lay_out_often", False),
    ("by_size_of_feedback", "resume_elsewhere", False),
    ("by_size_of_feedback", "resume_with_another_compressor", True),
    ("by_size_of_feedback", "change_plan", True),
    ("powersgd_rank_2", "change_plan_after_a_failure", False),
]


def grid() -> list[tuple[str, str, bool]]:
    """Compressors in scenarios, by turns with AccumulateGrad on a stream of its own and without.

    Each has a third of the scenarios: those that are alike stand side by side, and three have all scenarios.
    """
    cases = [
        (name, scenario, (row + column) % 2 == 1)
        for row, name in enumerate(CASES)
        for column, scenario in enumerate(SCENARIOS)
        if (row + column) % 3 == 0
    ]
    return list(dict.fromkeys([*cases, *SENSITIVE]))


@pytest.mark.parametrize(
    ("name", "scenario", "apart"),
    sampled(grid(), by_default=SENSITIVE),
)
def test_streams_are_in_order_and_memory_is_kept(name: str, scenario: str, apart: bool) -> None:
    """If it fails, a residual or an average is corrupt now and then, on one rank, without any sign."""
    assert list(findings(name, scenario, apart).findings) == []


@dataclass(frozen=True, kw_only=True)
class _FailsOnce(Averages):
    """Raises in one bucket, the second of the first step."""

    calls: list[int] = field(default_factory=list, compare=False)

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        self.calls.append(len(self.calls))
        if len(self.calls) == 2:
            raise MemoryError("no luck")
        yield from super().rounds(flat, layout, {}, channel)


def test_nothing_is_sent_after_a_failure() -> None:
    """If it fails, a rank that failed goes on sending, and its messages pair with others of its peers."""
    machine = Machine()
    with cuda_on(machine):
        training = Training(machine, _FailsOnce())
        training.sync(0)
        for index in (1, 2):
            with pytest.raises(GradientSyncError, match="MemoryError: no luck"):
                training.sync(index)
        assert training.hook.close() == {}
    assert [launch.name for launch in machine.launches if launch.stream.startswith("nccl")] == ["all_reduce"]


@pytest.mark.parametrize(("name", "streams"), [("bf16", {"side 1", "side 2"}), ("hierarchical_lossless", {"side 1"})])
def test_buckets_take_streams_of_high_priority_in_turn(name: str, streams: set[str]) -> None:
    """If it fails, no bucket is compressed while another is on the wire, or all wait for kernels of backward."""
    machine = Machine()
    with cuda_on(machine):
        Training(machine, CASES[name]).run(1)
    assert {launch.stream for launch in machine.launches if launch.stream.startswith("side")} == streams
    assert set(machine.priorities.values()) == {-1}


@pytest.mark.parametrize("name", sampled(CASES, by_default=["powersgd_rank_2"]))
def test_the_host_never_waits_once_buckets_are_laid_out(name: str) -> None:
    """If it fails, backward stands still in every step until the device has come so far."""
    machine = Machine()
    with warnings.catch_warnings(), cuda_on(machine):
        warnings.simplefilter("ignore")
        training = Training(machine, CASES[name])
        steps(training)
        machine.host_waits.clear()
        training.run(4)
    assert machine.host_waits == []


@pytest.mark.exhaustive
def test_every_wait_is_needed_and_its_absence_is_found() -> None:
    """If it fails, the check above is blind for one of the waits, or the wait is not needed."""
    waits = set.union(*(findings(*case).waits for case in SENSITIVE))
    assert len(waits) >= 5
    unnoticed = [wait for wait in sorted(waits) if not any(findings(*case, wait).findings for case in SENSITIVE)]
    assert unnoticed == []
