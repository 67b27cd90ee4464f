"""Compressed reduce-scatters of FSDP2 on more than two ranks: nodes, replicas, and shards of unequal sizes."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt.compat.collectives import CollectiveHooks
from lightning_commopt.compressors.sharded import ShardedBf16, ShardedCompressor, ShardedInt4, ShardedInt8
from lightning_commopt.compressors.sharded_hierarchical import ShardedHierarchical
from lightning_commopt.plan import OptionError
from lightning_commopt.sync.fsdp2.unit import UnitReduceScatter
from lightning_commopt.sync.gather import values_of_all_ranks
from lightning_commopt.testing.sharded_laws import (
    SHARDED_LAWS,
    ShardedSetup,
    averages_of,
    new_model,
    run_step,
)
from lightning_commopt.testing.steps import flatten
from support.collectives import needs_hooks, takes_collectives
from support.warm_ranks import run_ranks

pytestmark = takes_collectives
FEEDBACK = ShardedInt8(error_feedback=True, block_size=64)


def on_two_nodes(inner: ShardedCompressor) -> ShardedHierarchical:
    return ShardedHierarchical(inner=inner, ranks_per_node=2)


def _messages() -> dict[str, str]:
    messages = {}
    for inner in (ShardedBf16(), FEEDBACK, ShardedInt8(stochastic_rounding=True), ShardedInt4()):
        for name, law in SHARDED_LAWS.items():
            try:
                law(ShardedSetup(), str(inner), on_two_nodes(inner))
            except AssertionError as error:
                messages[f"{name}: {inner}"] = str(error)
    return messages


@pytest.mark.exhaustive
def test_laws() -> None:
    """If it fails, averages differ from those in float64, or more bytes cross nodes than are declared."""
    assert run_ranks(_messages, world_size=4) == [{}] * 4


def _seen_bytes(model: Any) -> Counter[str]:
    """Returns the bytes that process groups see in a step; gloo sends a rank's messages one by one, but for its own."""
    seen: Counter[str] = Counter()

    def issue(name: str, num_bytes: int) -> Any:
        seen[name] += num_bytes

    hooks = CollectiveHooks(issue, sees_end=False)
    run_step(model, ShardedSetup().gradients(0))
    hooks.close()
    return seen


def _flat_bytes() -> tuple[Counter[str], int]:
    model, sync = ShardedSetup().wrap(ShardedInt8())
    return _seen_bytes(model), sync.wire_bytes


@needs_hooks
def test_bytes_as_process_groups_see_them() -> None:
    """If it fails, more travels than is counted."""
    for seen, wire_bytes in run_ranks(_flat_bytes, world_size=3):
        assert seen["send"] == seen["recv"] == 2 * wire_bytes * 2 // 3
        assert seen["reduce_scatter"] == 0


def _bytes_across_nodes() -> tuple[int, int]:
    """Returns the bytes that are sent in a step, and those that shapes predict."""
    model, _ = ShardedSetup().wrap(on_two_nodes(ShardedInt8()))
    predicted = 0
    for unit in (*model.parts, model):
        rows = [(-(-p.shape[0] // 4) * p.shape[1:].numel(), p.dim()) for p in unit.parameters(recurse=False)]
        matrices = sum(numel for numel, dim in rows if dim > 1)
        # To one rank of the other node; to one rank of this node two shards in float32; vectors to all three.
        predicted += ShardedInt8().message_bytes(matrices, 2) // 2 + 2 * 4 * matrices
        predicted += 3 * 4 * sum(numel for numel, dim in rows if dim == 1)
    return _seen_bytes(model)["send"], predicted


@needs_hooks
def test_bytes_across_nodes() -> None:
    """If it fails, whole gradients cross nodes, or travel twice within one."""
    for seen, predicted in run_ranks(_bytes_across_nodes, world_size=4):
        assert seen == predicted


def _accumulated(num_replicas: int, mode: str) -> tuple[Tensor, Tensor]:
    model, _ = ShardedSetup(num_replicas=num_replicas).wrap(ShardedInt8())
    batches = 3
    given = []
    for batch in range(batches):
        is_last = batch == batches - 1
        model.set_requires_all_reduce(is_last)
        if mode == "unsharded":
            model.set_requires_gradient_sync(is_last)
        gradients = ShardedSetup().gradients(batch)
        given.append(flatten(gradients))
        model(gradients).backward()
    exact = torch.stack(values_of_all_ranks(torch.stack(given).sum(0))).mean(0)
    return exact, flatten(averages_of(model))


@pytest.mark.parametrize(("num_replicas", "mode"), [(1, "unsharded"), (2, "sharded")])
def test_accumulated_gradients(num_replicas: int, mode: str) -> None:
    """If it fails, sums over batches are divided twice, or lost."""
    for exact, got in run_ranks(_accumulated, num_replicas, mode, world_size=2 * num_replicas):
        assert 0 < (got - exact).norm() < 0.02 * exact.norm()


def _columns_of_marked_gradients() -> list[str]:
    """Sends gradients that hold the number of their parameter; returns those where a layout says another one."""
    module = new_model()
    module.get_parameter("parts.0.p1").grad_dtype = torch.bfloat16  # such gradients travel behind those in float32
    model, sync = ShardedSetup().wrap(ShardedBf16(), module)
    numbers = {name: float(index + 1) for index, (name, _) in enumerate(new_model().named_parameters())}
    wrong = []

    class Checked(UnitReduceScatter):
        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any) -> None:
            rows = input_tensor.view(dist.get_world_size(), -1)
            widths = [column.width(len(rows)) for column in self.columns]
            for column, part in zip(self.columns, rows.split(widths, 1), strict=True):
                if not set(part.unique().tolist()) <= {0.0, numbers[column.name]}:
                    wrong.append(column.name)
            super().__call__(output_tensor, input_tensor, *args, **options)

    for unit in sync.units:
        unit.__class__ = Checked
    run_step(model, {name: torch.full(p.shape, numbers[name]) for name, p in new_model().named_parameters()})
    return wrong


def test_columns_are_those_of_fsdp() -> None:
    """If it fails, FSDP2 lays out gradients in another order, and vectors are compressed instead of matrices."""
    assert run_ranks(_columns_of_marked_gradients, world_size=3) == [[]] * 3


def _handed_over(before: ShardedCompressor, after: ShardedCompressor) -> tuple[float, float]:
    """Returns what is lost of the residuals of one compressor that another goes on with, as a share, and their mean."""
    model, sync = ShardedSetup().wrap(before)
    for step in range(2):
        run_step(model, ShardedSetup().gradients(step))
    mean_before = _mean(sync.residuals())
    model, other = ShardedSetup().wrap(after)
    other.add_residuals(sync.residuals())
    received = run_step(model, {name: torch.zeros(p.shape) for name, p in new_model().named_parameters()})
    mean_after = _mean(other.residuals()) + flatten({name: received[name] for name in sorted(other.residuals())})
    return float((mean_after - mean_before).norm() / mean_before.norm()), float(mean_before.abs().max())


def _mean(residuals: dict[str, Tensor]) -> Tensor:
    return torch.stack(values_of_all_ranks(flatten({name: residuals[name] for name in sorted(residuals)}))).mean(0)


@pytest.mark.parametrize(
    ("before", "after"),
    [(on_two_nodes(FEEDBACK), FEEDBACK), (FEEDBACK, on_two_nodes(FEEDBACK))],
    ids=["to_flat", "from_flat"],
)
def test_residuals_are_handed_over(before: ShardedCompressor, after: ShardedCompressor) -> None:
    """If it fails, what was not sent is lost, or counts more often, when a fit goes on with other nodes."""
    for lost, size in run_ranks(_handed_over, before, after, world_size=4):
        assert size > 1e-4
        assert lost < 0.02


def _steps(overlaps: bool) -> list[Tensor]:
    model, sync = ShardedSetup().wrap(on_two_nodes(FEEDBACK))
    if overlaps:
        sync.allow_overlap()
    averages = []
    for step in range(3):
        model.zero_grad()
        model(ShardedSetup().gradients(step)).backward()
        averages.append(flatten(averages_of(model)))
    sync.detach()
    return averages


def _in_both_ways() -> bool:
    return all(torch.equal(*pair) for pair in zip(_steps(False), _steps(True), strict=True))


def test_overlapping_changes_no_bit() -> None:
    """If it fails, messages of two threads mix, or gradients are read before they are complete."""
    assert run_ranks(_in_both_ways, world_size=4) == [True] * 4


def test_a_residual_that_was_handed_over_can_be_asked_for_before_the_next_step() -> None:
    """If it fails, a checkpoint between the two has lost it."""
    compressor, residual = on_two_nodes(FEEDBACK), torch.arange(256.0).view(4, 64)
    state = compressor.init(64, 4, residual.device)
    compressor.set_residual(state, residual)
    kept = compressor.residual(state, 64, 4)
    assert kept is not None
    torch.testing.assert_close(kept, residual, rtol=0, atol=0)


def _refuse_incomplete_node() -> None:
    with pytest.raises(OptionError, match="comm_hook: ranks_per_node must divide the number of shards, 3, got 2"):
        ShardedSetup().wrap(on_two_nodes(FEEDBACK))


def test_nodes_that_cannot_be_made() -> None:
    """If it fails, ranks of a node that is not complete wait for others."""
    run_ranks(_refuse_incomplete_node, world_size=3)
