"""Predictions of FSDP2 from a run whose every part is known."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from lightning_commopt.compressors.sharded import ShardedInt4
from lightning_commopt.cost.basis import Basis
from lightning_commopt.cost.fsdp2.arithmetic import ShardCost
from lightning_commopt.cost.fsdp2.basis import (
    Conditions,
    ShardedBasis,
    has_sharded_basis,
    sharded_candidates,
    sharded_forecasts,
)
from lightning_commopt.cost.fsdp2.links import GLOO_RATIOS
from lightning_commopt.cost.fsdp2.workload import Exposure
from lightning_commopt.measure.forecasts import read_forecasts
from lightning_commopt.measure.link.link import PAYLOAD_SHARE
from lightning_commopt.measure.runs.files import PREDICTION_FILE
from lightning_commopt.plan.sharded import ShardedPlan
from support.sharded_samples import BF16, COMPUTE_S, EXCHANGE_S, INT8, basis

REST_S = 0.7
GATHERS_S, REDUCES_S = 4 * 2 * EXCHANGE_S, 2 * 3 * EXCHANGE_S
INT8_S = EXCHANGE_S * (1 + 4 / 128) / 4  # an exchange of codes and a scale for each block of 128


def test_the_runs_own_plan_takes_what_was_measured() -> None:
    for plan in (ShardedPlan(), ShardedPlan(comm_hook=BF16), ShardedPlan(comm_hook=INT8, param_hook="int8")):
        run = basis(plan, step_s=1.7)
        predicted = run.predict(plan)
        assert predicted.step_s == pytest.approx(1.7)
        assert predicted.low_s < 1.7 < predicted.high_s < 2.1


def test_noise_makes_no_step_take_no_time() -> None:
    """If it fails, a noisy run predicts that a compressor makes it up to 20 times as fast."""
    run = basis()
    noisy = dataclasses.replace(run, workload=dataclasses.replace(run.workload, spread_s=10.0))
    predicted = noisy.predict(ShardedPlan(comm_hook=INT8))
    assert predicted.step_s / predicted.low_s == pytest.approx(4)


def test_compressed_reduce_scatters_run_beside_backward() -> None:
    """If it fails, a compressor is predicted to save less or more than its bytes and what backward hides."""
    predicted = basis().predict(ShardedPlan(comm_hook=INT8))
    # That of the last unit is behind the next gathering, which it shares the link with; the other is after backward.
    assert predicted.step_s == pytest.approx(REST_S + 4 * COMPUTE_S + GATHERS_S + INT8_S, rel=1e-3)
    assert predicted.exposed_s == pytest.approx(GATHERS_S + INT8_S, rel=1e-3)


def test_compressed_parameters_block() -> None:
    predicted = basis().predict(ShardedPlan(param_hook="int8"))
    assert predicted.step_s == pytest.approx(REST_S + 4 * COMPUTE_S + 4 * INT8_S + REDUCES_S, rel=1e-3)


def test_arithmetic_counts() -> None:
    """If it fails, a slow compressor is recommended for its bytes."""
    run = dataclasses.replace(basis(), costs={INT8: ShardCost(1.0, 0.0, 0.5, 0.0)}, gather_cost=ShardCost(0.2, 0, 0, 0))
    plain = basis().predict(ShardedPlan(param_hook="int8")).step_s
    assert run.predict(ShardedPlan(param_hook="int8")).step_s == pytest.approx(plain + 4 * 0.2)
    slow = run.predict(ShardedPlan(comm_hook=INT8))
    assert slow.step_s > run.workload.step_s + 1.0
    assert slow.low_s > run.workload.step_s


def test_a_compressed_run_shows_the_uncompressed_one() -> None:
    """If it fails, whoever has tried a compressor is not told that it costs more than it saves."""
    ran = ShardedPlan(comm_hook=INT8)
    step_s = basis().predict(ran).step_s
    assert basis(ran, step_s=step_s).predict(ShardedPlan()).step_s == pytest.approx(basis().workload.step_s)


def test_a_model_that_takes_longer_than_the_step_is_scaled() -> None:
    """If it fails, a step is predicted to take no time, or less than none."""
    run = basis(step_s=0.5)
    assert run.predict(ShardedPlan()).step_s == pytest.approx(0.5)
    assert 0.2 < run.predict(ShardedPlan(comm_hook=INT8, param_hook="int8")).step_s < 0.5


def test_other_links_and_numbers_of_batches() -> None:
    plan, fast = ShardedPlan(), Conditions(bits_per_s=8e12)
    assert basis().predict(plan, fast).step_s == pytest.approx(REST_S + 4 * COMPUTE_S, rel=1e-2)
    twice = Conditions(bits_per_s=4e8 / PAYLOAD_SHARE)
    gather_ratio, reduce_ratio, _ = GLOO_RATIOS  # a byte in this run takes twice and three times as long as on the wire
    twice_s = 2 * (gather_ratio / 2 * GATHERS_S + reduce_ratio / 3 * REDUCES_S)
    assert basis().predict(plan, twice).exposed_s == pytest.approx(twice_s)
    on_cuda = basis(device="cuda", gathers=Exposure(GATHERS_S), reduces=Exposure(REDUCES_S))
    assert on_cuda.predict(plan, twice).step_s < basis().predict(plan, twice).step_s  # over NCCL, both once
    three = basis().predict(plan, Conditions(num_batches=3)).step_s
    assert three == pytest.approx(0.2 + 3 * (basis().workload.step_s - 0.2))
    unsharded = basis().predict(ShardedPlan(accumulate_grads="unsharded"), Conditions(num_batches=3)).step_s
    assert unsharded == pytest.approx(three - 2 * REDUCES_S)
    with pytest.raises(ValueError, match="num_batches"):
        basis().predict(plan, Conditions(num_batches=0))


def test_what_differs_between_ranks_in_collectives_shrinks_with_them() -> None:
    """If it fails, a run on a slow link shows steps on a fast one that wait for ranks that are not late."""
    plan, fast, own_s = ShardedPlan(), Conditions(bits_per_s=8e15), GATHERS_S + REDUCES_S
    slow_s = basis().predict(plan).step_s
    for straggler_s, shrinks_s in ((0.02, 0.02), (0.3, 0.1 * own_s)):
        run = basis(straggler_s=straggler_s)
        assert run.predict(plan).step_s == pytest.approx(slow_s)
        assert run.predict(plan, fast).step_s == pytest.approx(slow_s - own_s - shrinks_s)


@pytest.mark.parametrize("unknown_s", [-0.2, 0.0, 0.2])
def test_waits_that_the_model_does_not_explain_shrink_with_the_collectives(unknown_s: float) -> None:
    """If it fails, a link that is slower in training than alone shows steps that compute for seconds on a fast one."""
    plan, fast, own_s = ShardedPlan(), Conditions(bits_per_s=8e15), GATHERS_S + REDUCES_S
    computed_s = basis().workload.step_s - own_s
    run = basis(step_s=computed_s + own_s + unknown_s, waited_s=own_s + unknown_s)
    assert run.predict(plan).step_s == pytest.approx(computed_s + own_s + unknown_s)
    assert run.predict(plan, fast).step_s == pytest.approx(computed_s)
    twice = Conditions(bits_per_s=8e15, num_batches=2)
    assert run.predict(plan, twice).step_s == pytest.approx(0.2 + 2 * (computed_s - 0.2))
    late = basis(step_s=computed_s + own_s + 0.3, waited_s=own_s + 0.3, straggler_s=0.2 + 0.1 * own_s)
    assert late.predict(plan, fast).step_s == pytest.approx(computed_s + 0.2)


def test_other_numbers_of_ranks() -> None:
    alone = basis().predict(ShardedPlan(comm_hook=INT8), Conditions(num_ranks=1))
    assert alone.step_s == pytest.approx(REST_S + 4 * COMPUTE_S)
    many = basis(straggler_s=0.1).predict(ShardedPlan(), Conditions(num_ranks=64))
    share = (63 / 64) / (1 / 2)
    assert many.exposed_s == pytest.approx(share * (GATHERS_S + REDUCES_S))
    assert many.step_s > REST_S + 4 * COMPUTE_S + many.exposed_s + 0.1
    assert any("2 ranks were measured" in reason for reason in many.reasons)


def test_the_interval_is_as_wide_as_what_is_not_known() -> None:
    """If it fails, a verdict is sure of collectives that nobody has timed."""
    base = basis()
    sure = dataclasses.replace(base, links=dataclasses.replace(base.links, others=()))
    plan = ShardedPlan(comm_hook=INT8, param_hook="int8")
    known, unknown = sure.predict(plan), base.predict(plan)
    assert known.step_s == unknown.step_s
    assert known.high_s < unknown.high_s
    assert known.low_s > unknown.low_s


def test_on_cuda_what_is_hidden_stays_hidden_or_shrinks() -> None:
    """If it fails, FSDP2 on GPUs is promised what its overlap has already."""
    run = basis(device="cuda", gathers=Exposure(GATHERS_S), reduces=Exposure(REDUCES_S, 0.5 * REDUCES_S))
    hidden = run.predict(ShardedPlan(param_hook="int8"))
    assert hidden.step_s == pytest.approx(run.workload.step_s)
    reduced = run.predict(ShardedPlan(comm_hook=INT8))
    share = 2 * INT8_S / REDUCES_S
    ends = (0.0, 0.5 * REDUCES_S * share)
    assert reduced.step_s == pytest.approx(run.workload.step_s - 0.5 * REDUCES_S + sum(ends) / 2, rel=1e-3)
    assert any("how much computation hides" in reason for reason in reduced.reasons)


def test_candidates_are_all_pairs_of_hooks() -> None:
    plans = [plan for plan, _ in sharded_candidates(basis(), [None, BF16, INT8, ShardedInt4()])]
    assert {(plan.comm_hook, plan.param_hook) for plan in plans} == {
        *((hook, "int8") for hook in (None, BF16, INT8)),
        *((hook, None) for hook in (BF16, INT8)),
    }
    batches = sharded_candidates(basis(), [None], Conditions(num_batches=2))
    assert ShardedPlan(accumulate_grads="unsharded") in [plan for plan, _ in batches]


def test_forecasts_change_one_option_each() -> None:
    forecasts = sharded_forecasts(basis(num_batches=2), [None, BF16, INT8])
    assert [(forecast.setting, forecast.is_lossy) for forecast in forecasts] == [
        ('accumulate_grads="unsharded"', False),
        ('comm_hook="bf16"', True),
        ('comm_hook="int8"', True),
        ('param_hook="int8"', True),
    ]
    (exact, *_) = sharded_forecasts(basis(ShardedPlan(comm_hook=INT8)), [None])
    assert (exact.setting, exact.is_lossy) == ('comm_hook="none"', False)


def test_a_file_keeps_everything(tmp_path: Path) -> None:
    run = basis(ShardedPlan(comm_hook=INT8), gathers=Exposure(1.0, 0.5))
    forecasts = sharded_forecasts(run, [None])
    assert not has_sharded_basis(tmp_path)
    run.save(tmp_path, forecasts)
    assert has_sharded_basis(tmp_path)
    assert ShardedBasis.load(tmp_path / PREDICTION_FILE) == run
    assert read_forecasts(tmp_path) == forecasts


def test_files_of_either_strategy_are_told_apart(tmp_path: Path) -> None:
    """If it fails, buckets are looked for in a run of FSDP2, and the error names a key of JSON."""
    basis().save(tmp_path)
    with pytest.raises(ValueError, match="FSDP2"):
        Basis.load(tmp_path / PREDICTION_FILE)
    plain = json.loads((tmp_path / PREDICTION_FILE).read_text())
    del plain["strategy"]
    (tmp_path / PREDICTION_FILE).write_text(json.dumps(plain))
    assert not has_sharded_basis(tmp_path)


def test_a_run_whose_compressor_was_not_measured_predicts_nothing() -> None:
    with pytest.raises(ValueError, match="not measured"):
        dataclasses.replace(basis(), plan=ShardedPlan(comm_hook=ShardedInt4()))
