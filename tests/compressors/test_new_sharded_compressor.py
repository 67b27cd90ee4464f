"""What a compressor for both strategies takes: one file with a `ShardedCompressor`, one line, and one YAML."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lightning_commopt import CommOptDDP, CommOptModelParallel, CommPlan
from lightning_commopt.compressors import (
    Layout,
    ShardedCompressor,
    ShardedHierarchical,
    ShardedInt8,
    compressor_from_config,
    compressor_to_config,
    registry,
)
from lightning_commopt.compressors.base import finish
from lightning_commopt.compressors.catalog import example_compressors, ready_shards
from lightning_commopt.compressors.channel import AloneChannel
from lightning_commopt.compressors.configs import sharded_from_config
from lightning_commopt.compressors.shards import FromShards
from lightning_commopt.plan import OptionError
from lightning_commopt.strategy.adapters import aliases
from lightning_commopt.testing import check_compressor
from support.collectives import takes_collectives
from support.cross_section import sampled
from support.known import known

_FILE = '''
from dataclasses import dataclass

import torch

from lightning_commopt import Claims, ShardedCompressor, register_compressor


@register_compressor("fp8")
@dataclass(frozen=True, kw_only=True)
class Float8(ShardedCompressor):
    """Each gradient travels as one byte; the owner of a shard adds up in float32."""

    scale: float = 1.0
    claims = Claims(error_bound=0.12)

    def rounds(self, columns, means, state, channel):
        message = (torch.cat(columns, dim=1) * self.scale).to(torch.float8_e5m2)
        received = yield channel.all_to_all(message)
        mean = received.float().mean(0) / self.scale
        for target, part in zip(means, mean.split([column.shape[1] for column in columns]), strict=True):
            target.copy_(part)

    def message_bytes(self, numel, world_size):
        return world_size * numel
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The file, imported; the registry is as before afterwards."""
    monkeypatch.setattr(registry, "_SHARD_ENTRIES", dict(registry._SHARD_ENTRIES))
    (tmp_path / "new_sharded_float8.py").write_text(_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("new_sharded_float8")
    sys.modules.pop("new_sharded_float8")


@takes_collectives
def test_both_strategies_know_its_name(module: ModuleType) -> None:
    """If it fails, a user's compressor works with one strategy only, or something keeps a list of compressors."""
    compressor = module.Float8(scale=2.0)
    config = {"name": "fp8", "scale": 2.0}
    assert compressor_from_config(config) == FromShards(shards=compressor)
    assert sharded_from_config(config) == sharded_from_config(FromShards(shards=compressor)) == compressor
    assert compressor_to_config(compressor) == compressor_to_config(FromShards(shards=compressor)) == config
    assert CommOptDDP(comm_hook=config).plan.name == "fp8 scale 2"
    assert CommOptDDP(comm_hook=config).plan.to_dict() == {"comm_hook": config}
    assert CommOptModelParallel(comm_hook=config).plan.comm_hook == compressor
    assert aliases()["commopt_ddp_fp8_spawn"]["comm_hook"] == "fp8"
    assert example_compressors()["fp8"] == FromShards(shards=module.Float8())
    assert ready_shards()["fp8"] == module.Float8()


@pytest.mark.parametrize("shards", ready_shards().values(), ids=ready_shards())
def test_plan_with_compressor_of_shards_is_read_back(shards: Any) -> None:
    """If it fails, a fit that resumes or a file of a plan has the class for buckets with the same name, or an error."""
    plan = CommOptDDP(comm_hook=shards).plan
    assert CommPlan.from_dict(plan.to_dict()) == plan


@takes_collectives
@pytest.mark.parametrize("is_whole", sampled([False, True], by_default=[False]))
def test_it_obeys_the_laws_of_both(is_whole: bool, module: ModuleType) -> None:
    """If it fails, buckets that are averaged as shards are wrong, or more bytes travel than are counted."""
    check_compressor(module.Float8(), laws=None if is_whole else ["averages"])


@pytest.mark.parametrize("shards", ready_shards().values(), ids=ready_shards())
@pytest.mark.parametrize("numel", [1000, 1024])
def test_buckets_are_averaged_as_shards_in_every_step(shards: ShardedCompressor, numel: int) -> None:
    """If it fails, the adapter and the compressor of shards write to the same memory, in all steps but the first."""
    compressor, channel = FromShards(shards=shards), AloneChannel(2, 1)
    layout = Layout.of([torch.empty(numel, device="meta")], torch.float32)
    state = compressor.init(layout, torch.device("cpu"))
    for step in range(3):
        gradients = torch.randn(numel, generator=torch.Generator().manual_seed(step))
        flat = gradients.clone()
        finish(compressor.rounds(flat, layout, state, channel))
        own = slice(numel // 2, None)  # the other half is rank 0's, whose place this rank takes in a channel alone
        error = (flat[own] - gradients[own]).norm() / gradients[own].norm()
        assert error <= 1.5 * known(compressor.claims.error_bound)


@pytest.mark.parametrize("keeps_residual", [False, True])
def test_what_buckets_lose_without_a_residual_is_claimed(keeps_residual: bool) -> None:
    """If it fails, error feedback around it is allowed less than is lost, or more."""
    shards = ShardedInt8(error_feedback=keeps_residual)
    lost = shards.claims.untracked_error if keeps_residual else shards.claims.error_bound
    assert FromShards(shards=shards).claims.untracked_error == lost


@pytest.mark.parametrize("is_finite", [True, False])
def test_a_residual_is_sent_with_the_next_average_that_is_finite(is_finite: bool) -> None:
    """If it fails, what error feedback has held back is lost, or sent twice."""
    compressor, flat, residual = FromShards(shards=ShardedInt8()), torch.zeros(64), torch.ones(64)
    if not is_finite:
        flat[40] = torch.inf
    layout = Layout.of([flat], torch.float32)
    finish(compressor.rounds(flat, layout, compressor.init(layout, flat.device), AloneChannel(2, 1), residual))
    assert (residual == (0 if is_finite else 1)).all()
    if is_finite:
        torch.testing.assert_close(flat[32:], torch.ones(32))  # the other half is rank 0's


def test_shards_of_nodes_are_not_for_ddp() -> None:
    """If it fails, the first backward ends with an assertion."""
    with pytest.raises(OptionError, match=r"comm_hook.*ShardedHierarchical is for FSDP2 only"):
        CommOptDDP(comm_hook=ShardedHierarchical(inner=ShardedInt8()))  # type: ignore[arg-type]


def test_the_padding_of_a_bucket_is_not_what_an_earlier_bucket_has_left() -> None:
    """If it fails, large gradients of one bucket make the last block of the next one coarse."""
    compressor, received = FromShards(shards=ShardedInt8()), []
    for earlier in (0.0, 1e6):
        channel = AloneChannel(2, rank=1)
        for flat in (torch.full((64,), earlier), torch.arange(33.0)):
            layout = Layout.of([flat], torch.float32)
            finish(compressor.rounds(flat, layout, compressor.init(layout, flat.device), channel))
        received.append(flat)
    torch.testing.assert_close(*received, rtol=0, atol=0)
