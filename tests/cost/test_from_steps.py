"""What steps show of the model and of the link: of ranks on a simulated link whose numbers are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_commopt.cost.basis import Basis, basis_of_run
from lightning_commopt.cost.from_steps import even_gradients, link_of_steps, without_interrupts, workload_of_steps
from lightning_commopt.cost.shared_core import GLOO_CPU_S, Interrupts
from lightning_commopt.cost.workload import Gradient, Shape
from lightning_commopt.measure.files import StepWriter, rank_file
from lightning_commopt.measure.observer import BucketInfo
from lightning_commopt.measure.record import BucketSpan, Phase, StepRecord
from lightning_commopt.plan import CommPlan
from support.quick_costs import quick_costs
from support.sample_runs import SampleRun, write_run
from support.simulated_link import LATENCY_S, S_PER_BYTE, records_of_ranks

SIZES = (25_000_000, 1_000_000, 3_000_000)
SIZE = 12 * 10**6
OF_BUCKET = {i: BucketInfo(i, SIZE, (f"p{i}.a", f"p{i}.b", f"p{i}.c"), i == 1) for i in range(2)}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_link_is_found(num_ranks: int) -> None:
    """If it fails, waiting for other ranks or for other buckets counts as time on the link."""
    link = link_of_steps(records_of_ranks(20, SIZES, num_ranks), num_ranks=num_ranks, has_trees=True)
    assert link.time_s("all_reduce", 10**7, num_ranks) == pytest.approx(LATENCY_S + 1e7 * S_PER_BYTE, rel=1e-6)
    assert (link.low_ratio, link.high_ratio) == pytest.approx((1, 1))


def test_too_few_buckets() -> None:
    with pytest.raises(ValueError, match="3 times"):
        link_of_steps(records_of_ranks(2, SIZES), num_ranks=2)
    with pytest.raises(ValueError, match="no step has buckets"):
        workload_of_steps(
            [[StepRecord(step=0, num_samples=1, phases=(Phase("forward", 0, 1),), buckets=())]], num_ranks=2
        )


def step(number: int) -> StepRecord:
    """Forward takes 1 s, backward 4 s, its buckets are ready after 2 and 4 s, and on the wire for 3 and 4 s."""
    at_s = 10.0 * number
    buckets = []
    for index, (ready, end) in enumerate([(2, 5), (4, 9)]):
        times_s = {"ready_s": at_s + 1 + ready, "start_s": at_s + 1 + ready, "end_s": at_s + 1 + end}
        wire = ((times_s["start_s"], times_s["end_s"]),)
        buckets.append(BucketSpan(index=index, backward=0, wire=wire, gradient_bytes=SIZE, wire_bytes=SIZE, **times_s))
    bounds = [at_s, at_s + 1, at_s + 10, at_s + 10.5]
    names = ("forward", "backward", "optimizer")
    phases = tuple(Phase(name, a, b) for name, a, b in zip(names, bounds, bounds[1:], strict=False))
    return StepRecord(step=number, num_samples=1, phases=phases, buckets=tuple(buckets), layout=OF_BUCKET)


def test_the_parts_of_a_step() -> None:
    """If it fails, a step without gradient sync is not what is left of it."""
    work = workload_of_steps([[step(number) for number in range(5)]] * 2, num_ranks=2)
    assert (work.forward_s, work.backward_s, work.rest_s) == pytest.approx((1, 4, 0.5))
    assert [one.ready_s for one in work.gradients] == pytest.approx([2 / 3, 4 / 3, 2, 8 / 3, 10 / 3, 4])
    assert work.gradient_bytes == 24 * 10**6
    assert (work.spread_s, work.straggler_s, work.num_batches) == pytest.approx((0, 0, 1))


def test_a_run_whose_first_rank_is_slow_can_be_predicted() -> None:
    """If it fails, the last bucket of rank 0 is ready after the end of the backward of the median rank."""
    fast = [step(number) for number in range(5)]
    slow = [_late(record, 0.0, 0.5) for record in fast]
    basis = Basis.of_steps(CommPlan(), [slow, fast], {}, num_ranks=2)
    assert basis.workload.gradients[-1].ready_s > basis.workload.backward_s
    assert basis.predict(CommPlan()).step_s == pytest.approx(basis.step_s, rel=0.1)


def test_a_basis_survives_its_file(tmp_path: Path) -> None:
    steps = [[step(number) for number in range(5)]] * 2
    basis = Basis.of_steps(CommPlan(bucket_cap_mb=5), steps, {}, num_ranks=2, slowdown=2.0)
    assert basis.arithmetic_factor >= 2
    basis.save(tmp_path)
    assert basis_of_run(tmp_path) == basis
    (tmp_path / "prediction.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a result of"):
        basis_of_run(tmp_path)


def test_gradients_have_the_shapes_that_are_known() -> None:
    """If it fails, bfloat16 gradients count as half as many, and a matrix as a vector."""
    steps = [step(number) for number in range(5)]
    shapes = {"p0.a": Shape((1000, 2000), 2), "p0.b": Shape((10**6,), 4)}
    gradients = even_gradients(steps, shapes)
    assert [(one.shape, one.itemsize) for one in gradients[:3]] == [
        ((1000, 2000), 2),
        ((10**6,), 4),
        ((10**6,), 4),  # what the others leave of 12 MB
    ]
    assert [one.shape for one in gradients[3:]] == [(10**6,)] * 3
    assert sum(one.num_bytes for one in gradients) == 2 * SIZE


def test_a_run_that_was_cut_off(tmp_path: Path) -> None:
    """If it fails, only fits that have ended can be asked."""
    write_run(tmp_path, SampleRun())
    with quick_costs():
        basis = basis_of_run(tmp_path)
    assert not basis.workload.is_per_gradient
    assert basis.predict(CommPlan()).step_s == pytest.approx(basis.step_s, rel=0.2)
    assert len(basis.costs) > 3


def test_a_run_with_somebody_elses_hook(tmp_path: Path) -> None:
    for rank in range(2):
        header = {"rank": rank, "world_size": 2, "origin_unix_s": 0.0, "comm_hook": "my_hook"}
        StepWriter(rank_file(tmp_path, rank), header).write([step(0)])
    with pytest.raises(ValueError, match="'my_hook', is not from lightning_commopt"):
        basis_of_run(tmp_path)
    with pytest.raises(FileNotFoundError):
        basis_of_run(tmp_path / "nothing")


def test_processor_time_is_of_collectives_first_and_then_of_bytes() -> None:
    steps = [[step(number) for number in range(5)]] * 2
    link = link_of_steps(steps, num_ranks=2, comm_cpu_s=2 * GLOO_CPU_S + 0.5)
    assert link.cpu_s_per_message == pytest.approx(GLOO_CPU_S)
    assert link.cpu_s_per_byte == pytest.approx(0.5 / (2 * SIZE))
    link = link_of_steps(steps, num_ranks=2, comm_cpu_s=GLOO_CPU_S)
    assert (link.cpu_s_per_message, link.cpu_s_per_byte) == pytest.approx((GLOO_CPU_S / 2, 0))


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_processor_time_of_collectives_of_more_ranks(num_ranks: int) -> None:
    """If it fails, a run does not predict its own processor time, or more ranks cost no more of it."""
    steps = [[step(number) for number in range(5)]] * 2
    comm_cpu_s = 0.6 * 2 * GLOO_CPU_S  # of two buckets
    link = link_of_steps(steps, num_ranks=num_ranks, comm_cpu_s=comm_cpu_s)
    assert 2 * link.cpu_s("all_reduce", SIZE, num_ranks) == pytest.approx(comm_cpu_s)
    assert link.cpu_s("all_reduce", SIZE, 16) == pytest.approx(7 * link.cpu_s("all_reduce", SIZE, 2))
    assert link.cpu_s("all_to_all", SIZE, 16) == pytest.approx(4 * link.cpu_s("all_to_all", SIZE, 2))


def test_interrupts_are_the_links_work() -> None:
    """If it fails, plans that send less are predicted with the interrupts of one that sends everything."""
    steps = [[step(number) for number in range(5)]] * 2  # gradient sync takes 7 s of each, of which 2 beside backward
    gradients = [Gradient("a", (1,), 4, 2.0), Gradient("b", (1,), 4, 4.0)]
    assert [one.ready_s for one in without_interrupts(gradients, steps[0], 0.7)] == pytest.approx([1.9, 3.8])
    assert [one.ready_s for one in without_interrupts(gradients, steps[0], 1e3)] == pytest.approx([1, 2])
    assert without_interrupts((), steps[0], 0.7) == ()

    def learned(interrupts: Interrupts) -> Basis:
        return Basis.of_steps(
            CommPlan(), steps, {}, num_ranks=2, gradients=gradients, comm_cpu_s=0.2, slowdown=2, interrupts=interrupts
        )

    alone, seen, hidden = map(learned, (Interrupts(0, True), Interrupts(0.7, True), Interrupts(0.7, False)))
    assert seen.workload.backward_s == pytest.approx(0.95 * alone.workload.backward_s)
    assert hidden.workload == alone.workload
    more_s = [2 * SIZE * (one.link.cpu_s_per_byte - alone.link.cpu_s_per_byte) for one in (seen, hidden)]
    assert more_s == pytest.approx([0.7, 0.7])


def _late(record: StepRecord, forward_s: float, backward_s: float) -> StepRecord:
    """Returns a step whose forward takes longer, and whose backward does."""
    phases = (record.phases[0]._replace(end_s=record.phases[0].end_s + forward_s), *record.phases[1:])
    buckets = tuple(replace(bucket, ready_s=bucket.ready_s + backward_s) for bucket in record.buckets)
    return replace(record, phases=phases, buckets=buckets)


def test_a_rank_is_late_where_it_computes_and_not_where_it_shares_its_core() -> None:
    """If it fails, what gradient sync adds to backward counts as waiting for another rank."""
    steps = [step(number) for number in range(5)]
    for forward_s, backward_s, expected in ((0.0, 1.0, (0.5, 0.0)), (0.2, 0.0, (0.1, 0.1)), (0.2, 1.0, (0.6, 0.51))):
        ranks = [steps, [_late(record, forward_s, backward_s) for record in steps]]
        found = [
            workload_of_steps(ranks, num_ranks=2, shares_core=shares_core).straggler_s for shares_core in (False, True)
        ]
        assert found == pytest.approx(expected, abs=0.01)
