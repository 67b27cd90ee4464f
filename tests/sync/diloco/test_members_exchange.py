"""PatientExchange between threads that stand for ranks: what a failed attempt leaves, and what a loss keeps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_commopt.compressors import compressor_from_config
from lightning_commopt.sync.diloco.errors import UnequalStepsError
from lightning_commopt.sync.diloco.exchange import Arrived, GlobalWeights, LocalWeights
from lightning_commopt.sync.diloco.fragments import split_model
from lightning_commopt.sync.diloco.members import Members, MembersError
from lightning_commopt.sync.diloco.outer import OuterSGD
from lightning_commopt.sync.diloco.patient import PatientExchange
from lightning_commopt.sync.diloco.report import Report, check_same_step

OUTER = OuterSGD(lr=1.0, momentum=0.5, nesterov=False)
MEAN = OuterSGD(lr=1.0, momentum=0.0, nesterov=False)


class Rank:
    """One rank with a model of one fragment."""

    def __init__(self, rank: int, store: dist.Store, world_size: int, hook: Any, outer: OuterSGD = OUTER) -> None:
        torch.manual_seed(0)
        options: dict[str, Any] = {"patience_s": 3.0, "timeout_s": 60.0, "log": lambda text: None}
        self.store = dist.PrefixStore("members", store)
        self.members = Members(self.store, rank, world_size, **options)
        mesh = dist.PrefixStore("mesh", store)
        self.exchange = PatientExchange(self.members, mesh, compressor_from_config(hook), patience_s=3.0)
        fragment = split_model(nn.Linear(32, 32), 1, "bytes")[0]
        self.outer, self.of = outer, GlobalWeights.of(fragment, outer)
        self.exchange.begin([self.of], {})

    def run(self, difference: Tensor, samples: float = 1.0, **others: float) -> Arrived:
        local = LocalWeights(self.of.weights - difference, [], [], None)
        with torch.no_grad():
            arrived = self.exchange.run(self.of, local, Report(samples, **others), 0, self.outer)
        self.of.take(arrived)
        return arrived


def make(world_size: int, hook: Any = None, outer: OuterSGD = OUTER) -> list[Rank]:
    store = dist.HashStore()
    return [Rank(rank, store, world_size, hook, outer) for rank in range(world_size)]


def run(ranks: list[Rank], differences: list[Tensor]) -> list[Arrived]:
    with ThreadPoolExecutor() as pool:
        return [*pool.map(lambda rank, difference: rank.run(difference), ranks, differences)]


def differences(number: int, seed: int) -> list[Tensor]:
    return [*torch.randn(number, 32 * 33, generator=torch.Generator().manual_seed(seed))]


def test_who_all_come_move_as_one_optimizer_on_the_mean() -> None:
    """If it fails, patience alone changes what a healthy run computes."""
    ranks = make(2)
    weights = nn.Parameter(ranks[0].of.weights.clone())
    optimizer = torch.optim.SGD([weights], lr=OUTER.lr, momentum=OUTER.momentum)
    for seed in range(3):
        parts = differences(2, seed)
        arrived = run(ranks, parts)
        weights.grad = (parts[0] + parts[1]) / 2
        optimizer.step()
        for rank, one in zip(ranks, arrived, strict=True):
            assert one.is_complete
            torch.testing.assert_close(rank.of.weights, weights.detach(), rtol=1e-5, atol=1e-5)


def test_what_is_unsent_is_sent_after_a_loss() -> None:
    ranks = make(2, {"name": "int4", "error_feedback": True}, MEAN)
    run(ranks, differences(2, 0))
    left = ranks[0]
    unsent, before, difference = left.exchange.unsent(left.of), left.of.weights.clone(), differences(1, 1)[0]
    assert unsent is not None
    assert unsent.norm() > 0.01
    unsent = unsent.clone()
    left.run(difference)
    rest = left.exchange.unsent(left.of)
    assert rest is not None
    torch.testing.assert_close(before - left.of.weights + rest, difference + unsent, rtol=1e-5, atol=1e-5)


def test_a_failed_attempt_changes_nothing() -> None:
    """One rank fails once after all others have succeeded; if they kept anything, its second attempt would count it."""
    hook = {"name": "int4", "error_feedback": True}
    ranks, expected = make(3, hook), make(3, hook)
    run(ranks, differences(3, 0))
    run(expected, differences(3, 0))
    conclude, failed = ranks[1].members.conclude, []

    def fail_once(attempt: Any, *, is_success: bool) -> bool:
        failed.append(attempt)
        return conclude(attempt, is_success=is_success and len(failed) > 1)

    ranks[1].members.conclude = fail_once  # type: ignore[method-assign]
    run(ranks, differences(3, 1))
    run(expected, differences(3, 1))
    assert len(failed) == 2
    for one, other in zip(ranks, expected, strict=True):
        torch.testing.assert_close(one.of.weights, other.of.weights, rtol=1e-5, atol=1e-5)
        assert one.of.momentum is not None
        assert other.of.momentum is not None
        torch.testing.assert_close(one.of.momentum, other.of.momentum, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(one.exchange.unsent(one.of), other.exchange.unsent(other.of), rtol=1e-5, atol=1e-5)


def test_the_mean_is_over_who_came_by_samples() -> None:
    ranks = make(3, outer=MEAN)
    before = ranks[0].of.weights.clone()
    parts = differences(2, 0)
    with ThreadPoolExecutor() as pool:
        arrived = [*pool.map(lambda rank, part, samples: rank.run(part, samples), ranks[:2], parts, (1.0, 3.0))]
    assert [report.samples for report in arrived[0].reports] == [1.0, 3.0]
    torch.testing.assert_close(before - ranks[0].of.weights, (parts[0] + 3 * parts[1]) / 4)
    late = ranks[2].run(differences(1, 5)[0])
    assert late.has_missed
    assert ranks[2].of.weights.equal(before)


def test_an_exchange_that_fails_again_and_again_is_an_error() -> None:
    ranks = make(2)
    for one in ranks:
        conclude = one.members.conclude
        one.members.conclude = lambda attempt, *, is_success, inner=conclude: inner(attempt, is_success=False)  # type: ignore[method-assign,misc]
    with pytest.raises(MembersError, match=r"failed 3 times, although all of them were there: .* patience_s=3"):
        run(ranks, differences(2, 0))


def test_a_joiner_and_the_others_begin_new_states_of_the_compressor() -> None:
    """This compressor sends two different factors in turns; who joins must not send the other one."""
    ranks = make(3, {"name": "alternating_powersgd", "matrix_rank": 1})
    for seed in (0, 1):
        run(ranks, differences(3, seed))
    run(ranks[:2], differences(2, 2))
    assert ranks[2].run(differences(1, 3)[0]).has_missed
    *others, joiners = differences(3, 4)
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(ranks[2].run, joiners)
        ranks[2].store.wait(["3/0/here/2"])  # nobody waits for a rank that was missed, so it must be there first
        arrived = [*run(ranks[:2], others), joining.result()]
    assert arrived[2].joined is not None
    assert [report.samples for report in arrived[0].reports] == [1.0, 1.0, 0.0]
    assert ranks[0].of.weights.equal(ranks[2].of.weights)
    assert ranks[0].of.momentum is not None
    assert ranks[2].of.momentum is not None
    assert ranks[0].of.momentum.equal(ranks[2].of.momentum)


def test_ranks_in_different_batches() -> None:
    """If it fails, a rank that has left out a step is one batch behind for good, and late at each end of an epoch."""
    ranks, (difference,) = make(2), differences(1, 0)
    places = [{"num_steps": 3.0, "batch": 3.0 + rank} for rank in range(2)]
    with ThreadPoolExecutor() as pool:
        exchanges = [pool.submit(rank.run, difference, **place) for rank, place in zip(ranks, places, strict=True)]
        for exchange in exchanges:
            with pytest.raises(UnequalStepsError, match="rank 0 is at step 3 in batch 3, rank 1 is at step 3 in batch"):
                exchange.result()
    with pytest.raises(UnequalStepsError, match="rank 1 is at step 3 in batch 3, rank 4 is at step 3 in batch 4"):
        check_same_step([Report(1.0, **place) for place in places], (1, 4))
