"""Reduce-scatters that run beside backward on CPU: the same gradients, complete when backward has ended."""

import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_commopt import CommOptModelParallel, shard
from lightning_commopt.compat.fsdp import units_of
from lightning_commopt.compressors.sharded import ShardedBf16, ShardedInt8
from lightning_commopt.sync.fsdp2.gradients import Overlap, ShardedSync
from lightning_commopt.sync.fsdp2.unit import _reduce_scatter
from lightning_commopt.testing.sharded_laws import ShardedSetup, averages_of
from lightning_commopt.testing.steps import flatten
from support.collectives import takes_collectives
from support.strategy_models import Tiny, loader, trainer
from support.warm_ranks import run_ranks

pytestmark = takes_collectives


def _steps(overlaps: bool, fsdp: dict[str, Any], num_replicas: int) -> tuple[list[Tensor], int, int]:
    """Returns the averages of steps, of which some accumulate; what ran beside backward; and bytes."""
    setup = ShardedSetup(options=fsdp, num_replicas=num_replicas)
    model, sync = setup.wrap(ShardedInt8(error_feedback=True))
    if overlaps:
        sync.allow_overlap()
    averages, submitted = [], []
    submit = Overlap.submit

    def counted(self: Overlap, *args: Any) -> None:
        submitted.append(1)
        submit(self, *args)

    with patch.object(Overlap, "submit", counted):
        for step in range(4):
            if step != 2:  # step 2 adds to the gradients of step 1
                model.zero_grad()
            model(ShardedSetup().gradients(step)).backward()
            averages.append(flatten(averages_of(model)))
    sync.detach()
    return averages, len(submitted), sync.wire_bytes


@pytest.mark.parametrize(
    ("fsdp", "num_replicas", "num_submitted"),
    [
        ({}, 1, 3 * 4),
        # FSDP2 casts what is reduced.
        pytest.param(
            {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}, 1, 3 * 4, marks=pytest.mark.exhaustive
        ),
        pytest.param({}, 2, 0, marks=pytest.mark.exhaustive),  # FSDP2 all-reduces it.
    ],
    ids=str,
)
def test_overlapping_changes_no_bit(fsdp: dict[str, Any], num_replicas: int, num_submitted: int) -> None:
    """If it fails, gradients are read before they are complete, or reduced in another order."""
    world_size = 2 * num_replicas
    blocking = run_ranks(_steps, False, fsdp, num_replicas, world_size=world_size)
    overlapping = run_ranks(_steps, True, fsdp, num_replicas, world_size=world_size)
    for (expected, none, its_bytes), (got, submitted, other_bytes) in zip(blocking, overlapping, strict=True):
        assert (none, submitted) == (0, num_submitted)
        assert its_bytes == other_bytes
        assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


class _Twice(nn.Module):
    """Uses one unit twice in a forward, so that its gradients are reduced twice in a backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.unit = nn.Linear(40, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.unit(self.unit(x).tanh()).square().mean()


def _of_unit_used_twice(overlaps: bool) -> Tensor:
    model = _Twice()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (model.unit, model):
        fully_shard(module, mesh=mesh)
    sync = ShardedSync(ShardedBf16())
    sync.attach(model)
    if overlaps:
        sync.allow_overlap()
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(dist.get_rank())).requires_grad_()
    model(x).backward()
    return model.unit.weight.grad.full_tensor()  # type: ignore[union-attr]


def test_a_unit_that_is_used_twice() -> None:
    """If it fails, a gradient is added to one that has not arrived yet."""
    blocking, overlapping = (run_ranks(_of_unit_used_twice, overlaps)[0] for overlaps in (False, True))
    assert blocking.abs().max() > 0
    assert torch.equal(blocking, overlapping)


def _cleared_on_one_rank() -> Tensor:
    model, sync = ShardedSetup().wrap(ShardedBf16())
    sync.allow_overlap()
    model(ShardedSetup().gradients(0)).backward()
    for parameter in model.parameters():
        parameter.grad = None if dist.get_rank() else torch.zeros_like(parameter.grad)
    model(ShardedSetup().gradients(0)).backward()
    return flatten(averages_of(model))


def test_gradients_that_one_rank_has_cleared() -> None:
    """If it fails, ranks of which only some have dropped gradients, such as infinite ones, wait for each other."""
    first, second = run_ranks(_cleared_on_one_rank, limit_s=60, group_timeout_s=20)
    assert first.abs().max() > 0
    assert torch.equal(first, second)


def _hooked() -> list[bool]:
    model, sync = ShardedSetup().wrap(ShardedInt8())
    sync.allow_overlap()
    seen: list[Tensor] = []
    parameter = model.p0
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.to_local().clone()))
    model(ShardedSetup().gradients(0)).backward()
    return [torch.equal(one, parameter.grad.to_local()) for one in seen]


def test_hooks_of_gradients_see_complete_ones() -> None:
    """If it fails, an optimizer that steps in backward uses memory that nothing has been written to."""
    assert run_ranks(_hooked) == [[True]] * 2


def _double(reduced: Tensor) -> None:
    reduced.mul_(2)


def _all_reduced_by_hooks() -> tuple[Tensor, Tensor]:
    """Returns the averages of a step, and those of one whose units have a hook that doubles what was reduced."""
    model, sync = ShardedSetup().wrap(ShardedBf16())
    sync.allow_overlap()
    averages = []
    for _ in range(2):
        model(ShardedSetup().gradients(0)).backward()
        averages.append(flatten(averages_of(model)))
        model.zero_grad()
        for unit in units_of(model):
            unit.set_all_reduce_hook(_double)
    return averages[0], averages[1]


def test_hooks_that_all_reduce_see_complete_gradients() -> None:
    """If it fails, what a hook of the user's does to gradients, set after the first step, is overwritten."""
    for plain, doubled in run_ranks(_all_reduced_by_hooks):
        assert plain.abs().max() > 0
        assert torch.equal(doubled, 2 * plain)


def _fails(task: Callable[..., Any]) -> str:
    model, sync = ShardedSetup().wrap(ShardedInt8())
    sync.allow_overlap()
    with patch("lightning_commopt.sync.fsdp2.unit._reduce_scatter", task):
        try:
            model(ShardedSetup().gradients(0)).backward()
        except RuntimeError as error:
            return str(error)
    return ""


def _broken(*args: Any) -> None:
    raise RuntimeError("no route to rank 1")


def test_an_error_is_raised_by_backward() -> None:
    """If it fails, the optimizer steps with memory that nothing has been written to."""
    assert all("no route to rank 1" in message for message in run_ranks(_fails, _broken))
    assert run_ranks(_fails, _reduce_scatter) == ["", ""]


class _Sharded(Tiny):
    """Compares, in a hook that Lightning calls within backward, gradients with those at the end of the step."""

    def configure_model(self) -> None:
        shard(self, self.device_mesh, blocks=150)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_after_backward(self) -> None:
        self.seen = [p.grad.to_local().clone() for p in self.parameters()]  # type: ignore[union-attr]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        time.sleep(0.05)  # long enough for what may still be under way
        now = [p.grad.to_local() for p in self.parameters()]  # type: ignore[union-attr]
        assert all(torch.equal(*pair) for pair in zip(self.seen, now, strict=True))


def _fit() -> int:
    run = trainer(CommOptModelParallel(comm_hook="int8"), max_epochs=1)
    with patch("lightning_commopt.sync.fsdp2.unit._reduce_scatter", _slow):
        run.fit(_Sharded(), loader(16))
    return run.global_step


def _slow(*args: Any) -> None:
    time.sleep(0.02)
    _reduce_scatter(*args)


def test_hooks_after_backward_see_complete_gradients() -> None:
    """If it fails, gradient norms that a user logs are those of memory that is not filled yet."""
    assert run_ranks(_fit) == [2, 2]


def _succeed(channel: object) -> None:
    pass


def _raise(channel: object) -> None:
    raise ArithmeticError("no luck")


@pytest.mark.parametrize(("task", "num_returned"), [(_succeed, 1), (_raise, 0)])
def test_groups_are_not_used_again_after_a_failure(task: Callable[[object], None], num_returned: int) -> None:
    """If it fails, the next fit pairs its messages with those of a gradient sync that did not end."""
    group, groups = Mock(), Mock()
    with patch("lightning_commopt.sync.fsdp2.gradients.borrow_groups", return_value=groups):
        overlap = Overlap([group], Mock())
    with suppress(RuntimeError):  # of the future, around what the task raises
        overlap.submit(task, torch.zeros(1), group, nullcontext)
    overlap.close()
    assert groups.return_to_pool.call_count == num_returned
