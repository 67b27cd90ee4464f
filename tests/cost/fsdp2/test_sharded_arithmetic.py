"""The arithmetic of compressed shards, measured alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from lightning_commopt.compressors import Rounds, ShardedCompressor, ShardedHierarchical
from lightning_commopt.compressors.base import Claims, State
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.compressors.sharded import ShardedBf16, ShardedInt4, ShardedInt8
from lightning_commopt.cost.fsdp2.arithmetic import measure_gather_cost, measure_shard_costs, predicted_shards

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Broken(ShardedCompressor):
    claims = Claims(error_bound=0.5)

    def rounds(self, columns: list[torch.Tensor], means: list[torch.Tensor], state: State, channel: Channel) -> Rounds:
        raise ArithmeticError("broken on purpose")

    def message_bytes(self, numel: int, world_size: int) -> int:
        return numel


def test_compressors_are_measured_and_training_does_not_notice() -> None:
    """If it fails, a plan is predicted without its arithmetic, or measuring changes a fit's random numbers."""
    hooks = [hook for hook in predicted_shards() if hook is not None]
    before = torch.get_rng_state()
    costs = measure_shard_costs(hooks, 2**20, CPU, 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert costs.keys() == {*hooks}
    for cost in (*costs.values(), measure_gather_cost(2**20, CPU, 3)):
        assert all(seconds > 0 for seconds in cost.times_s(2**20))
        assert cost.slower(2.0).times_s(2**20) == pytest.approx([2 * seconds for seconds in cost.times_s(2**20)])


def test_what_predictions_try_is_what_is_recommended() -> None:
    none, bf16, *others = predicted_shards()
    assert (none, bf16) == (None, ShardedBf16())
    assert {*others} == {cls(error_feedback=value) for cls in (ShardedInt8, ShardedInt4) for value in (False, True)}


def test_what_cannot_run_alone_is_left_out() -> None:
    """If it fails, a user's compressor ends a fit that does not even use it."""
    with pytest.warns(UserWarning, match="failed on scratch gradients") as caught:
        costs = measure_shard_costs([Broken(), ShardedHierarchical(inner=ShardedInt8())], 2**20, CPU, 2)
    assert (costs, len(caught)) == ({}, 1)
