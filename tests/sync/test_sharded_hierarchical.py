"""Reduce-scatters of FSDP2 that compress across nodes only, on four ranks as two nodes."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_commopt.compat.collectives import CollectiveHooks
from lightning_commopt.compressors.configs import compressor_to_config, sharded_from_config
from lightning_commopt.compressors.sharded import ShardedBf16, ShardedCompressor, ShardedInt4, ShardedInt8
from lightning_commopt.compressors.sharded_hierarchical import ShardedHierarchical
from lightning_commopt.plan import OptionError
from lightning_commopt.testing.sharded_laws import (
    SHARDED_LAWS,
    ShardedSetup,
    averages_of,
    new_model,
    run_step,
)
from lightning_commopt.testing.steps import flatten, of_all_ranks
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


def _sent_bytes() -> tuple[int, int]:
    """Returns the bytes that process groups see in a step, and those that shapes predict."""
    model, _ = ShardedSetup().wrap(on_two_nodes(ShardedInt8()))
    observed: Counter[str] = Counter()

    def issue(name: str, num_bytes: int) -> Any:
        observed[name] += num_bytes

    hooks = CollectiveHooks(issue, sees_end=False)
    run_step(model, ShardedSetup().gradients(0))
    hooks.close()
    predicted = 0
    for unit in (*model.parts, model):
        rows = [(-(-p.shape[0] // 4) * p.shape[1:].numel(), p.dim()) for p in unit.parameters(recurse=False)]
        matrices = sum(numel for numel, dim in rows if dim > 1)
        # To one rank of the other node; to one rank of this node two shards in float32; vectors to all three.
        predicted += ShardedInt8().message_bytes(matrices, 2) // 2 + 2 * 4 * matrices
        predicted += 3 * 4 * sum(numel for numel, dim in rows if dim == 1)
    return observed["send"], predicted


@needs_hooks
def test_bytes_as_process_groups_see_them() -> None:
    """If it fails, whole gradients cross nodes, or travel twice within one."""
    for observed, predicted in run_ranks(_sent_bytes, world_size=4):
        assert observed == predicted


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
    return torch.stack(of_all_ranks(flatten({name: residuals[name] for name in sorted(residuals)}))).mean(0)


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


def _refused() -> str:
    try:
        ShardedSetup().wrap(ShardedHierarchical(inner=FEEDBACK, ranks_per_node=2))
    except OptionError as error:
        return str(error)
    return ""


def test_a_residual_that_was_handed_over_can_be_asked_for_before_the_next_step() -> None:
    """If it fails, a checkpoint between the two has lost it."""
    compressor, residual = on_two_nodes(FEEDBACK), torch.arange(256.0).view(4, 64)
    state = compressor.init(64, 4, residual.device)
    compressor.set_residual(state, residual)
    kept = compressor.residual(state, 64, 4)
    assert kept is not None
    torch.testing.assert_close(kept, residual, rtol=0, atol=0)


def test_nodes_that_cannot_be_made() -> None:
    """If it fails, ranks of a node that is not complete wait for others."""
    for message in run_ranks(_refused, world_size=3):
        assert message == "comm_hook: ranks_per_node must divide the number of shards, 3, got 2"


def test_configurations() -> None:
    """If it fails, a checkpoint or a YAML makes another compressor."""
    compressor = on_two_nodes(FEEDBACK)
    assert sharded_from_config(compressor_to_config(compressor)) == compressor
    assert sharded_from_config({"name": "hierarchical", "inner": "bf16"}) == ShardedHierarchical(inner=ShardedBf16())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("hierarchical", "'hierarchical' needs the option 'inner'"),
        ({"name": "hierarchical", "inner": None}, "inner must be 'bf16', 'int8' or 'int4'.*, got None"),
        ({"name": "hierarchical", "inner": {"name": "hierarchical", "inner": "bf16"}}, "inner must be 'bf16'"),
        ({"name": "hierarchical", "inner": "powersgd"}, "'powersgd' averages whole gradients on every rank"),
        ({"name": "hierarchical", "inner": "int8", "ranks_per_node": 0}, "ranks_per_node must be"),
    ],
)
def test_values(config: Any, message: str) -> None:
    """If it fails, a wrong option is noticed late, or not at all."""
    with pytest.raises(ValueError, match=message):
        sharded_from_config(config)
