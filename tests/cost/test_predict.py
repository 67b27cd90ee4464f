"""Predictions: of worlds that can be worked out by hand, of huge ones, and what they lean on."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from statistics import median

import pytest

from lightning_commopt.compressors import compressor_from_config
from lightning_commopt.compressors.base import PIECE_NUMEL
from lightning_commopt.cost.basis import Basis
from lightning_commopt.cost.candidates import candidates
from lightning_commopt.cost.compressor_cost import CompressorCost, Stage
from lightning_commopt.cost.predict import LEAST_SHARE, Errors, errors_of, jobs_of, outcome_of, predict
from lightning_commopt.cost.workload import Gradient, Workload
from lightning_commopt.measure.link.link import PAYLOAD_SHARE, Link
from lightning_commopt.plan import CommPlan

MIB = 2**20
GRADIENTS = tuple(Gradient(f"p{index}", (512, 512), 4, 0.1 * (index + 1)) for index in range(4))
WORK = Workload(gradients=GRADIENTS, forward_s=0.2, backward_s=0.4, rest_s=0.1, num_ranks=2)
LINK = Link(hop_s=0.0, s_per_byte=0.1 / MIB)
INT8 = compressor_from_config("int8")
COST = CompressorCost(
    compressor=INT8,
    stages=(Stage(0.0, 0.0, "all_to_all", 1.0), Stage(0.0, 0.0, "all_gather", 1.0), Stage(0.0, 0.0)),
)
COSTS = {INT8: COST}


def test_two_ranks_and_buckets_of_one_gradient() -> None:
    """Each takes 0.1 s on the link, as long as backward takes for the next: only the last one is exposed."""
    found = predict(CommPlan(bucket_cap_mb=0.5), WORK, LINK, {})
    assert (found.step_s, found.exposed_s) == pytest.approx((0.8, 0.1))
    assert found.low_s < found.step_s < found.high_s


def test_noise_makes_no_step_take_no_time() -> None:
    """If it fails, a noisy run predicts plans that are "1.00 (0.48 to 20.2)" times as fast, or less than was seen."""
    found = predict(CommPlan(bucket_cap_mb=0.5), dataclasses.replace(WORK, spread_s=1.0), LINK, {})
    assert found.step_s / found.low_s == pytest.approx(4)
    slow = dataclasses.replace(LINK, s_per_byte=1 / MIB)  # computing takes 0.7 s of 4.4 s
    found = predict(CommPlan(bucket_cap_mb=0.25), dataclasses.replace(WORK, spread_s=10.0), slow, {})
    assert found.low_s == pytest.approx(0.9 * 0.7)
    files = (Path(__file__).parents[2] / "benchmarks" / "results").glob("*prediction*.json")
    rows = [row for file in files for row in json.loads(file.read_text())["rows"]]
    shares = [
        row["predicted"] / median(row["speedups"]) if "speedups" in row else row["measured_s"] / row["predicted_s"]
        for row in rows
    ]
    assert len(shares) > 1000
    assert min(shares) > 1.5 * LEAST_SHARE


def test_one_bucket_waits_for_backward() -> None:
    found = predict(CommPlan(bucket_cap_mb=100), WORK, LINK, {})
    assert (found.step_s, found.exposed_s) == pytest.approx((1.1, 0.4))


def test_two_threads_of_gloo_share_the_link_and_hooks_take_turns() -> None:
    """If it fails, stock DDP on CPUs is predicted as it is on GPUs, or as with a hook."""
    ready = dataclasses.replace(WORK, gradients=tuple(each._replace(ready_s=0.1) for each in GRADIENTS[:2]))
    assert outcome_of(CommPlan(bucket_cap_mb=0.5), ready, LINK, {}, 2).ends_s == pytest.approx((0.3, 0.3))
    turns = outcome_of(CommPlan(bucket_cap_mb=0.5, comm_hook=INT8), ready, LINK, COSTS, 2).ends_s
    assert turns[1] - turns[0] == pytest.approx(turns[0] - 0.1)


def test_a_quarter_of_the_bytes() -> None:
    found = predict(CommPlan(bucket_cap_mb=100, comm_hook=INT8), WORK, LINK, COSTS)
    assert found.exposed_s == pytest.approx(0.4 * (1 + 4 / 128) / 4, rel=1e-3)


def test_the_interval_has_the_errors_of_the_model_the_link_and_the_arithmetic() -> None:
    """If it fails, a plan is recommended, or not tried, for an interval that is too narrow or has its ends swapped."""
    plan, rough = CommPlan(bucket_cap_mb=100), dataclasses.replace(LINK, low_ratio=0.5, high_ratio=2.0)
    found = predict(plan, WORK, rough, {})  # 0.4 s of 1.1 s are exposed
    assert found.low_s == pytest.approx(1.1 - math.hypot(0.11, 0.2))
    assert found.high_s == pytest.approx(1.1 + math.hypot(0.11, 0.4))
    found = predict(plan, WORK, rough, {}, fitted=(plan, errors_of(plan, WORK, rough, {}, 2)))
    assert (found.low_s, found.high_s) == pytest.approx((1.1 - 0.11, 1.1 + 0.11))  # the link was as it is
    plan, exact = dataclasses.replace(plan, comm_hook=INT8), dataclasses.replace(LINK, low_ratio=1.0, high_ratio=1.0)
    costs = {INT8: CompressorCost(compressor=INT8, stages=(Stage(0.3, 0.0, "all_gather", 0.5),))}
    assert errors_of(plan, WORK, exact, costs, 2) == pytest.approx(Errors(0.0, 0.0, -0.1, 0.15))
    found = predict(plan, WORK, exact, costs, fitted=(CommPlan(), Errors(0.0, 0.0, -0.2, 0.05)))
    assert found.exposed_s == pytest.approx(0.3 + 0.4 * (1 + 4 / 128) / 4 / 4)
    assert found.low_s == pytest.approx(found.step_s - math.hypot(0.1 * found.step_s, 0.1, 0.05))
    assert found.high_s == pytest.approx(found.step_s + math.hypot(0.1 * found.step_s, 0.15, 0.2))


def test_a_large_bucket_is_cut_into_pieces_of_so_many_elements() -> None:
    bucket = [Gradient("p", (2, PIECE_NUMEL), 4, 0.1)]
    assert len(jobs_of(CommPlan(comm_hook=INT8), [bucket], LINK, COSTS, 2, "cpu")) == 2


def test_more_ranks_send_more_and_hop_more() -> None:
    """A ring of four sends one and a half times the bytes of a ring of two, in six hops instead of two."""
    link = dataclasses.replace(LINK, hop_s=0.01)
    two, four = (predict(CommPlan(bucket_cap_mb=100), WORK, link, {}, num_ranks=n).exposed_s for n in (2, 4))
    assert two == pytest.approx(0.4 + 0.02)
    assert four == pytest.approx(0.6 + 0.06)


def test_trees_where_rings_take_too_many_hops() -> None:
    ring, tree = Link(hop_s=1e-5, s_per_byte=1e-10), Link(hop_s=1e-5, s_per_byte=1e-10, has_trees=True)
    assert ring.time_s("all_reduce", MIB, 1024) == pytest.approx(2046e-5 + 2 * MIB * 1e-10 * 1023 / 1024)
    assert tree.time_s("all_reduce", MIB, 1024) == pytest.approx(20e-5 + 2 * MIB * 1e-10)
    assert tree.time_s("all_reduce", 1000 * MIB, 2) == ring.time_s("all_reduce", 1000 * MIB, 2)


def test_one_rank_sends_nothing() -> None:
    found = predict(CommPlan(comm_hook=INT8), WORK, LINK, {}, num_ranks=1)
    assert (found.step_s, found.exposed_s) == pytest.approx((0.7, 0.0))
    with pytest.raises(ValueError, match="num_ranks"):
        predict(CommPlan(), WORK, LINK, {}, num_ranks=0)


def test_a_faster_link_is_as_fast_as_the_processor_lets_it() -> None:
    link = Link(hop_s=0.0, s_per_byte=1e-7, cpu_s_per_byte=5e-10)
    assert link.at_rate(1e8).s_per_byte == pytest.approx(8e-8, rel=0.06)
    assert link.at_rate(1e12).s_per_byte == pytest.approx(5e-10)
    # Several threads may spend more processor time on a byte than it takes to be sent; no rate makes it slower then.
    slow_core = dataclasses.replace(link, s_per_byte=5e-10, cpu_s_per_byte=7e-10)
    assert slow_core.at_rate(1e12).s_per_byte == slow_core.s_per_byte
    with pytest.raises(ValueError, match="bits_per_s"):
        link.at_rate(0)


def test_a_faster_link_wakes_threads_less_often_for_as_many_bytes() -> None:
    """If it fails, a run at 100 Mbit/s predicts that 10 Gbit/s is no faster than 1 Gbit/s."""
    link = Link(hop_s=0.0, s_per_byte=8e-8 / PAYLOAD_SHARE, cpu_s_per_byte=6.4e-9)
    assert link.at_rate(4e8).cpu_s_per_byte == pytest.approx(3.2e-9)
    fast = link.at_rate(1e10)
    assert fast.s_per_byte == pytest.approx(8e-10 / PAYLOAD_SHARE)
    assert fast.cpu_s_per_byte == 8e-10
    assert link.at_rate(1e12).s_per_byte == 8e-10
    assert link.at_rate(1e7).cpu_s_per_byte == link.cpu_s_per_byte
    light = dataclasses.replace(link, cpu_s_per_byte=3e-10)
    assert light.at_rate(1e10).cpu_s_per_byte == 3e-10


def test_more_bytes_than_a_run_has_shown_never_take_less_time() -> None:
    """If it fails, a compressed run without a probe predicts that bf16 is no faster than sending everything."""
    link = Link(hop_s=0.0, s_per_byte=1e-9, cpu_s_per_byte=1e-10, seen_bytes=1e8)
    sizes = [1e8 * factor for factor in (1.0, 1.9, 2.0, 2.1, 4.0, 8.0)]
    links = [link.for_bytes(num_bytes) for num_bytes in sizes]
    times_s = [each.time_s("all_reduce", num_bytes, 2) for each, num_bytes in zip(links, sizes, strict=True)]
    assert times_s == sorted(set(times_s))
    ends_s = [ratio * times_s[-1] for ratio in (links[-1].low_ratio, links[-1].high_ratio)]
    assert ends_s == pytest.approx([0.05, 0.8])  # from half of that of the bytes seen to 8 times that
    assert times_s[-1] == pytest.approx(0.34, abs=0.01)
    assert [each.cpu_s("all_reduce", num_bytes, 2) for each, num_bytes in zip(links, sizes, strict=True)][3:] == (
        pytest.approx([0.02, 0.02, 0.02])
    )


def test_accumulation() -> None:
    """Four batches take 3 forwards and backwards more, and send as often."""
    more = WORK.accumulating(4)
    steps_s = [predict(CommPlan(), work, LINK, {}, num_ranks=1).step_s for work in (WORK, more, more.accumulating(1))]
    assert steps_s == pytest.approx([0.7, 0.7 + 3 * 0.6, 0.7])
    plan = CommPlan(bucket_cap_mb=100)
    assert predict(plan, more, LINK, {}).exposed_s == predict(plan, WORK, LINK, {}).exposed_s


def test_more_ranks_have_a_later_last_one() -> None:
    work = dataclasses.replace(WORK, straggler_s=0.01, spread_s=0.02)
    waits = [predict(CommPlan(), work, LINK, {}, num_ranks=n).step_s for n in (2, 1024)]
    exact = [predict(CommPlan(), WORK, LINK, {}, num_ranks=n).step_s for n in (2, 1024)]
    assert waits[0] - exact[0] == pytest.approx(0.01)
    assert 0.03 < waits[1] - exact[1] < 0.1


def test_what_it_leans_on() -> None:
    work = dataclasses.replace(WORK, is_per_gradient=False)
    reasons = " ".join(predict(CommPlan(comm_hook=INT8), work, LINK, {}, num_ranks=8).reasons)
    assert "evenly" in reasons
    assert "int8 was not measured" in reasons
    assert "2 ranks were measured" in reasons


@pytest.mark.parametrize("hook", [None, INT8], ids=str)
def test_sixteen_thousand_ranks_take_no_time(hook: object) -> None:
    """If it fails, predicting a large world depends on its size. A second is a hundred times what it takes."""
    gradients = tuple(Gradient(f"p{index}", (1024, 1024), 4, 1e-3 * index) for index in range(400))
    work = dataclasses.replace(WORK, gradients=gradients)
    began = time.process_time()
    assert predict(CommPlan(comm_hook=hook), work, LINK, COSTS, num_ranks=16384).step_s > 0  # type: ignore[arg-type]
    assert time.process_time() - began < 1


def test_candidates_begin_with_the_fastest() -> None:
    basis = Basis(plan=CommPlan(bucket_cap_mb=100), workload=WORK, link=LINK, costs=COSTS, step_s=1.0)
    found = candidates(basis, [None, INT8, compressor_from_config("bf16")])
    times_s = [candidate.prediction.step_s for candidate in found]
    assert times_s == sorted(times_s)
    assert found[0].plan.comm_hook == INT8
    assert CommPlan(bucket_cap_mb=100) in [candidate.plan for candidate in found]
    assert {candidate.plan.comm_hook for candidate in found} == {None, INT8}  # bf16 was not measured
