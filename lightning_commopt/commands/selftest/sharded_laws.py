"""Checks of the laws for FSDP2, with compressors of shards that cover all options that change what they compute."""

from __future__ import annotations

import torch.distributed as dist

from lightning_commopt.commands.selftest.checks import NotChecked, check
from lightning_commopt.commands.selftest.laws import check_all
from lightning_commopt.compressors import ShardedBf16, ShardedCompressor, ShardedHierarchical, ShardedInt4, ShardedInt8
from lightning_commopt.compressors.catalog import ready_shards
from lightning_commopt.testing.law import Law
from lightning_commopt.testing.laws import same_collectives
from lightning_commopt.testing.places import Place
from lightning_commopt.testing.sharded_laws import SHARDED_LAWS, ShardedSetup, why_unavailable


def example_shards(num_replicas: int = 1) -> dict[str, ShardedCompressor]:
    """Returns compressors with all options that change what they compute; nodes of one or two ranks, as can be."""
    num_shards = dist.get_world_size() // num_replicas
    ranks_per_node = 2 if num_shards > 2 and num_shards % 2 == 0 else 1
    int8, int4, feedback = ShardedInt8, ShardedInt4, ShardedInt8(error_feedback=True, block_size=64)
    examples = [
        *(ShardedBf16(), int8(), int8(stochastic_rounding=True), feedback, int4(), int4(error_feedback=True)),
        ShardedHierarchical(inner=feedback, ranks_per_node=ranks_per_node),
        *ready_shards().values(),
    ]
    return {str(compressor): compressor for compressor in examples}


def _add(law: Law) -> None:
    def check_sharded(place: Place) -> str:
        if reason := why_unavailable(place):
            raise NotChecked(reason)
        return check_all(law, ShardedSetup(place=place), example_shards())

    check(f"FSDP2: {law.statement}")(check_sharded)


for _law in SHARDED_LAWS.values():
    if _law is not same_collectives:
        _add(_law)
