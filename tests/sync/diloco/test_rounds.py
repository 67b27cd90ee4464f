"""Rounds on real ranks against the algorithm, computed in float64 for all workers in one process, and their start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_commopt.compressors.channel import Channel
from lightning_commopt.plan import DiLoCoPlan
from lightning_commopt.sync.diloco.equalize import equalize
from lightning_commopt.sync.diloco.exchange import Exchange
from lightning_commopt.sync.diloco.rounds import Rounds
from support.warm_ranks import run_ranks

_NUM_STEPS = 14
Numbers = dict[str, np.ndarray]


class _Model(nn.Module):
    """Blocks in float64, so that nothing but the order of sums differs from the reference."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(3, 3).double() for _ in range(4))
        self.empty = nn.Parameter(torch.zeros(0, 2, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))


def _updates(worker: int) -> Iterator[dict[str, Tensor]]:
    """Yields what a worker adds to 0.9 times its parameters in each step."""
    generator = torch.Generator().manual_seed(worker)
    shapes = {name: x.shape for name, x in _Model().named_parameters()}
    while True:
        yield {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def _samples(worker: int, step: int, is_uneven: bool) -> int:
    return 4 + (worker * step) % 3 if is_uneven else 4


def _new_rounds(**options: Any) -> tuple[_Model, Rounds]:
    model = _Model()
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    plan = DiLoCoPlan(**options)
    return model, Rounds(plan, model, Exchange(Channel(world), plan.comm_hook))


def _train(
    is_uneven: bool, finishes_at: int, options: dict[str, Any]
) -> tuple[list[Numbers], Numbers, list[list[str]]]:
    """Returns this worker's parameters after each step, the final ones, and the names in each fragment."""
    model, rounds = _new_rounds(**options)
    rank, after = dist.get_rank(), []
    for step, update in zip(range(1, _NUM_STEPS + 1), _updates(rank), strict=False):
        rounds.show_own()
        rounds.counts.samples += _samples(rank, step, is_uneven)
        with torch.no_grad():
            for name, x in model.named_parameters():
                x.mul_(0.9).add_(update[name])
            model.mean += rank
            model.count += rank + 1
        rounds.step()
        after.append({name: x.detach().numpy().copy() for name, x in model.named_parameters()})
        if step == finishes_at:
            rounds.finish()
    rounds.finish()
    final = {name: x.detach().numpy().copy() for name, x in [*model.named_parameters(), *model.named_buffers()]}
    assert rounds.close()
    return after, final, [[*of.fragment.parameters] for of in rounds.fragments]


def _reference(
    num_workers: int, is_uneven: bool, plan: DiLoCoPlan, fragments: list[list[str]]
) -> tuple[list[list[Numbers]], Numbers]:
    """Returns every worker's parameters after each step, and the final ones.

    DiLoCo, algorithm 1, and streaming DiLoCo, algorithm 2. At the end what is under way arrives, and what was trained
    since its last exchange becomes the mean.
    """
    start = {name: x.detach().numpy() for name, x in _Model().named_parameters()}
    theta, momentum = dict(start), dict.fromkeys(start, 0.0)
    own = [dict(start) for _ in range(num_workers)]
    updates = [_updates(worker) for worker in range(num_workers)]
    counted = [[0] * num_workers for _ in fragments]
    due: dict[int, list[tuple[str, np.ndarray]]] = {}
    after: list[list[Numbers]] = [[] for _ in range(num_workers)]

    def apply(step: int) -> None:
        for name, new in due.pop(step, []):
            theta[name] = new
            for worker in own:
                worker[name] = plan.own_share * worker[name] + (1 - plan.own_share) * new

    for step in range(1, _NUM_STEPS + 1):
        for worker, update in enumerate(next(updates[worker]) for worker in range(num_workers)):
            own[worker] = {name: 0.9 * x + update[name].numpy() for name, x in own[worker].items()}
        for counts in counted:
            counts[:] = [n + _samples(worker, step, is_uneven) for worker, n in enumerate(counts)]
        apply(step)
        for index, (names, counts) in enumerate(zip(fragments, counted, strict=True)):
            if step % plan.sync_every != index * plan.sync_every // plan.fragments:
                continue
            for name in names:
                delta = sum(n * (theta[name] - x[name]) for n, x in zip(counts, own, strict=True)) / sum(counts)
                momentum[name] = plan.outer_momentum * momentum[name] + delta
                move = delta + plan.outer_momentum * momentum[name] if plan.nesterov else momentum[name]
                due.setdefault(step + plan.overlap, []).append((name, theta[name] - plan.outer_lr * move))
            counts[:] = [0] * num_workers
        apply(step)
        for worker, numbers in enumerate(own):
            after[worker].append(dict(numbers))
    for step in sorted(due):
        apply(step)
    for names, counts in zip(fragments, counted, strict=True):
        for name in names if any(counts) else ():
            theta[name] = np.average([x[name] for x in own], axis=0, weights=counts)
    return after, theta


@pytest.mark.parametrize(
    ("is_uneven", "options"),
    [
        pytest.param(True, {"sync_every": 5, "fragments": 3, "overlap": 2}, id="streaming"),
        pytest.param(False, {"sync_every": 4}, id="paper"),
        pytest.param(False, {"sync_every": 3, "outer_lr": 1.0, "outer_momentum": 0.0}, id="mean"),
        pytest.param(
            True,
            {"sync_every": 6, "fragments": 2, "fragment_by": "bytes", "overlap": 5, "mixing": 0.2, "nesterov": False},
            id="mixing",
        ),
    ],
)
def test_equals_the_algorithm(is_uneven: bool, options: dict[str, Any]) -> None:
    """If it fails, workers move differently than the papers say; a ``finish`` in between must change nothing."""
    ranks = run_ranks(_train, is_uneven, 7, options, world_size=3)
    fragments = ranks[0][2]
    expected, ends = _reference(3, is_uneven, DiLoCoPlan(**options), fragments)
    for (got, final, names), steps in zip(ranks, expected, strict=True):
        assert names == fragments
        for name, x in ends.items():
            np.testing.assert_allclose(final[name], x, rtol=1e-10, atol=1e-12, err_msg=f"{name} at the end")
        for step, (numbers, reference) in enumerate(zip(got, steps, strict=True), 1):
            for name, x in reference.items():
                np.testing.assert_allclose(numbers[name], x, rtol=1e-10, atol=1e-12, err_msg=f"{name} in step {step}")


def _freeze() -> list[Numbers]:
    """Freezes a block on all ranks after two steps, and after three another one on rank 0 only."""
    model, rounds = _new_rounds(sync_every=1, fragments=1)
    rank, after = dist.get_rank(), []
    for step, update in zip(range(6), _updates(rank), strict=False):
        model.blocks[1].requires_grad_(step < 2)
        model.blocks[2].requires_grad_(step < 3 or rank > 0)
        with torch.no_grad():
            for name, x in model.named_parameters():
                x.add_(update[name], alpha=int(x.requires_grad))
        rounds.step()
        after.append({name: x.detach().numpy().copy() for name, x in model.named_parameters()})
    assert rounds.close()
    return after


def test_parameters_without_a_gradient_stay_as_they_are() -> None:
    """If it fails, momentum moves what a user has frozen, or ranks that freeze differently get different weights."""
    plan, updates = DiLoCoPlan(), [_updates(rank) for rank in range(2)]
    expected = dict(_Model().named_parameters())
    outer = torch.optim.SGD(expected.values(), plan.outer_lr, plan.outer_momentum, nesterov=plan.nesterov)
    ranks = run_ranks(_freeze)
    for step, *numbers in zip(range(6), *ranks, strict=True):
        first, second = (next(update) for update in updates)
        for name, x in expected.items():
            of_first = 0 if name.startswith("blocks.2") and step > 2 else first[name]
            is_frozen = name.startswith("blocks.1") and step > 1
            x.grad = None if is_frozen else -(of_first + second[name]) / 2
        outer.step()
        for got in numbers:
            for name, x in expected.items():
                np.testing.assert_allclose(got[name], x.detach(), rtol=1e-10, atol=1e-12, err_msg=f"{name} in {step}")
            assert step < 2 or (got["blocks.1.weight"] == ranks[0][1]["blocks.1.weight"]).all()


def _end_between_exchanges() -> tuple[Numbers, Numbers]:
    options = {"sync_every": 100, "fragments": 2, "outer_lr": 0.3}
    after, final, _ = _train(False, 0, options)
    return after[-1], final


def test_fit_ends_with_the_mean_of_the_workers() -> None:
    """If it fails, what was trained after the last exchange is lost, or buffers differ between ranks."""
    ranks = run_ranks(_end_between_exchanges)
    for _, final in ranks:
        for name, x in ranks[0][0].items():
            np.testing.assert_allclose(final[name], (x + ranks[1][0][name]) / 2, rtol=1e-10, err_msg=name)
        assert final["mean"].tolist() == [_NUM_STEPS / 2] * 2  # the mean of what rank 0 and rank 1 have counted
        assert final["count"] == _NUM_STEPS  # that of rank 0


def _equalize_layers() -> list[list[float]]:
    rank = dist.get_rank()
    with pytest.raises(ValueError, match=r"the shapes of a parameter on the ranks are \[\(2,\), \(3,\)\]"):
        equalize([nn.Parameter(torch.ones(2 + rank))])
    with pytest.raises(ValueError, match="lazy modules whose parameters are not initialized: run a forward in setup"):
        equalize([*nn.LazyLinear(2).parameters()])
    with pytest.raises(ValueError, match=r"layout torch.sparse_csr and shape \(3, 3\).* as a plain attribute"):
        equalize([torch.ones(2), torch.eye(3).to_sparse_csr()])
    alike, other, cache = torch.ones(3), torch.full((2,), float(rank)), torch.full((rank, 2), 7.0)
    equalize([alike, other, cache, torch.ones(1 - rank, 2)])
    return [alike.tolist(), other.tolist(), cache.tolist()]


def test_all_ranks_get_the_tensors_of_the_first() -> None:
    """If it fails, ranks begin with different models, or those that cannot be equal end without a reason."""
    assert run_ranks(_equalize_layers) == [[[1.0] * 3, [0.0] * 2, []]] * 2
