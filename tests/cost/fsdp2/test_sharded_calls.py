"""What the calls of FSDP2's comm objects show: usual batches, computation between calls, and how loaded links are."""

from __future__ import annotations

import pytest

from lightning_commopt.cost.fsdp2.arithmetic import ShardCost
from lightning_commopt.cost.fsdp2.calls import (
    TimedCall,
    backward_of,
    blocking,
    forward_of,
    load_of,
    usual_batches,
)
from lightning_commopt.cost.fsdp2.from_fit import basis_of_fit
from lightning_commopt.cost.fsdp2.links import Load
from lightning_commopt.cost.fsdp2.workload import Payload
from lightning_commopt.measure.record import Collective, Phase, StepRecord
from lightning_commopt.plan.sharded import ShardedPlan
from support.sharded_samples import COMPUTE_S, EXCHANGE_S, INT8, NO_COST, UNIT, links


def batch(*, stretch: float = 1.0, compressed: bool = False, reduces: bool = True) -> list[TimedCall]:
    gather_s, reduce_s = stretch * 2 * EXCHANGE_S, stretch * 3 * EXCHANGE_S
    calls = [
        TimedCall("forward", "all_gather", 0, UNIT.parameters.num_bytes, True, gather_s, COMPUTE_S),
        TimedCall("backward", "all_gather", 0, UNIT.parameters.num_bytes, True, gather_s, COMPUTE_S),
    ]
    if reduces:
        calls.append(
            TimedCall("backward", "reduce_scatter", 0, UNIT.gradients.num_bytes, not compressed, reduce_s, COMPUTE_S)
        )
    return calls


def step(
    num_batches: int = 1, collectives: tuple[Collective, ...] = (), waits: tuple[tuple[float, float], ...] = ()
) -> StepRecord:
    phases = [Phase("forward", 0.0, 0.1), *[Phase("backward", 0.1, 0.8)] * num_batches, Phase("optimizer", 0.8, 1.0)]
    return StepRecord(step=0, num_samples=1, phases=tuple(phases), buckets=(), collectives=collectives, waits=waits)


def test_usual_batches_reduce_gradients() -> None:
    """If it fails, batches that are only accumulated, or the first one, are taken for those that communicate."""
    batches = [batch(), *[batch(), batch(reduces=False)] * 4, batch()[:1]]
    usual = usual_batches(batches)
    assert usual == [batch()] * 4
    assert forward_of(usual) == (0,)
    assert [(call.operation, call.after_s) for call in backward_of(usual, 1.5)] == [
        ("all_gather", 1.5 * COMPUTE_S),
        ("reduce_scatter", 1.5 * COMPUTE_S),
    ]
    assert usual_batches(batches[:4]) == usual_batches([]) == []


def test_collectives_beside_compression_do_not_count() -> None:
    """If it fails, a link that two threads share is taken for a slow one."""
    assert len(blocking(batch())) == 3
    assert [call.phase for call in blocking(batch(compressed=True))] == ["forward"]


def test_how_loaded_links_are() -> None:
    batches, lines = [batch(stretch=1.5)] * 3, links().expected
    least_s = [[call.seconds for call in blocking(one)] for one in batches]
    found = load_of(batches, least_s, [UNIT], lines, NO_COST, 2)
    assert found.ratios == pytest.approx({"all_gather": 1.5, "reduce_scatter": 1.5})
    # The three calls take 2, 2 and 3 exchanges alone, and are delayed by 1, 1 and 1.5.
    assert found[1:] == pytest.approx((1.5, 7 / 3 * EXCHANGE_S, EXCHANGE_S))
    found = load_of([batch(compressed=True)] * 3, [[EXCHANGE_S]] * 3, [UNIT], lines, NO_COST, 2)
    assert found.ratios == pytest.approx({"all_gather": 0.5})
    assert found[1:] == pytest.approx((0.5, 2 * EXCHANGE_S, -EXCHANGE_S))


def test_a_delay_that_small_messages_do_not_have_is_in_proportion() -> None:
    """If it fails, a slow link of large all-gathers shows exchanges that take long without any bytes."""
    small = UNIT._replace(parameters=Payload(0, 1, 4), gradients=Payload(0, 1, 4))
    batches = [[*batch(stretch=3.0), batch()[1]._replace(unit=1, seconds=1e-3)]] * 3
    least_s = [[call.seconds for call in blocking(one)] for one in batches]
    found = load_of(batches, least_s, [UNIT, small], links().expected, NO_COST, 2)
    assert found.delay_s == pytest.approx(1e-3, rel=1e-3)
    trained = links().expected.in_training(Load({}, *found[1:]))
    assert trained.exchange.hop_s == pytest.approx(0.5e-3, rel=1e-3)
    assert trained.exchange.s_per_byte == pytest.approx(3 * links().expected.exchange.s_per_byte, rel=0.02)


def test_compressed_parameters_show_the_link_too() -> None:
    """If it fails, a run that compresses everything is taken to have had the idle link of the probe."""
    cost, sent_s = ShardCost(0.01, 0.0, 0.02, 0.0), EXCHANGE_S * (1 + 4 / 128) / 4
    batches = [[call._replace(is_own=False) for call in batch(compressed=True)]] * 3
    found = load_of(batches, [[3 * (sent_s + 0.03)]] * 3, [UNIT], links().expected, cost, 2)
    assert found.ratios == pytest.approx({"exchange": 3.0}, rel=1e-3)
    assert found.ratio == found.ratios["exchange"]


def test_the_basis_of_a_fit_on_cpu() -> None:
    """If it fails, waiting for other ranks is taken for a slow link, or the other way round."""
    batches = [batch(stretch=3.0)] * 5
    least_s = [[call.seconds / 2 for call in blocking(one)] for one in batches]
    found = basis_of_fit(
        ShardedPlan(), [UNIT], batches, [step(2)] * 30, links(), {INT8: NO_COST}, NO_COST, num_ranks=2, least_s=least_s
    )
    assert found.links.expected.all_gather.s_per_byte == pytest.approx(1.5 * links().expected.all_gather.s_per_byte)
    work = found.workload
    assert work.straggler_s == pytest.approx(2 * 1.5 * 7 * EXCHANGE_S)  # two batches, each 2 + 2 + 3 exchanges long
    assert (work.num_batches, work.spread_s) == (2, 0.0)
    assert work.once_s == pytest.approx(0.2)
    assert work.waited_s is None  # unknown where no step has recorded a wait
    assert found.predict(ShardedPlan()).step_s == pytest.approx(step(2).totals.step_s)


def test_the_basis_has_what_steps_waited_on_cpu() -> None:
    seen = step(1, (), ((0.1, 0.2), (0.15, 0.4), (0.6, 0.65)))
    least_s = [[call.seconds for call in blocking(batch())]] * 3
    for device, waited_s in (("cpu", pytest.approx(0.35)), ("cuda", None)):
        found = basis_of_fit(
            ShardedPlan(),
            [UNIT],
            [batch()] * 3,
            [seen] * 3,
            links(),
            {INT8: NO_COST},
            NO_COST,
            num_ranks=2,
            least_s=least_s,
            device=device,
        )
        assert found.workload.waited_s == waited_s


def test_the_basis_of_a_fit_on_cuda() -> None:
    """If it fails, what FSDP2's streams hide on GPUs counts as time of the step."""
    gather = Collective("all_gather", "forward", "", 8, 0.0, 0.4)
    reduce = Collective("reduce_scatter", "backward", "", 8, 0.4, 0.7)
    seen = step(1, (gather, reduce, gather._replace(start_s=None, end_s=None)), ((0.1, 0.2), (0.6, 0.9)))
    calls = [call._replace(after_s=0.0) for call in batch()]
    found = basis_of_fit(
        ShardedPlan(), [UNIT], [calls] * 3, [seen] * 3, links(), {INT8: NO_COST}, NO_COST, num_ranks=2, device="cuda"
    )
    assert found.workload.gathers == pytest.approx((0.4, 0.1))
    assert found.workload.reduces == pytest.approx((0.3, 0.1))
    both = found.predict(ShardedPlan(comm_hook=INT8, param_hook="int8"))
    assert seen.totals.step_s - 0.2 <= both.step_s < seen.totals.step_s
    ran = ShardedPlan(comm_hook=INT8, param_hook="int8")
    compressed = basis_of_fit(
        ran, [UNIT], [calls] * 3, [seen] * 3, links(), {INT8: NO_COST}, NO_COST, num_ranks=2, device="cuda"
    )
    assert compressed.predict(ran).step_s == pytest.approx(seen.totals.step_s)


def test_too_little_was_seen() -> None:
    with pytest.raises(ValueError, match="too few"):
        basis_of_fit(ShardedPlan(), [UNIT], [], [step()], links(), {}, NO_COST, num_ranks=2)
