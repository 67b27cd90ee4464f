"""What ranks with FSDP2 do on the fake device."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fake_device.device import Outcome, digest, in_all_schedules
from lightning_commopt.compressors.sharded import ShardedCompressor
from lightning_commopt.plan.sharded import ShardedPlan
from lightning_commopt.sync.fsdp2.model_sync import ShardedModelSync

_WIDTH = 32
_NUM_BLOCKS = 3
_STEPS = 3
_PRECISIONS: Mapping[str, dict[str, Any]] = {
    "32": {},
    "bf16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
}


@dataclass(frozen=True, kw_only=True)
class ShardedCase:
    """How a model is trained.

    Attributes:
        compressor: of reduce-scatters; None for FSDP2's own.
        gathers_int8: whether all-gathers are compressed too, as ``param_hook`` does.
        precision: of parameters and gradients on the wire.
        resharding: whether parameters are gathered in backward again.
        later: the compressors after the first step, after the second, and so on.
        freezes: whether a matrix is frozen after the first step.
    """

    compressor: ShardedCompressor | None
    gathers_int8: bool = False
    precision: str = "32"
    resharding: bool = True
    later: tuple[ShardedCompressor | None, ...] = ()
    freezes: bool = False


class _Block(nn.Module):
    """Matrices between vectors, so that a part of each unit travels uncompressed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.last = nn.Linear(_WIDTH, 48), nn.Parameter(torch.ones(48)), nn.Linear(48, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last((self.first(x) * self.scale).relu())


def run_sharded(case: ShardedCase) -> dict[str, Outcome]:
    """Trains a model in all schedules."""
    torch.cuda.set_device(dist.get_rank())
    warnings.simplefilter("ignore")  # of settings that are made for a test
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    return in_all_schedules(lambda: _train(case, mesh))


def _train(case: ShardedCase, mesh: Any) -> Outcome:
    torch.manual_seed(0)
    device = torch.device("cuda", dist.get_rank())
    model = nn.Sequential(*(_Block() for _ in range(_NUM_BLOCKS))).to(device)
    policy = MixedPrecisionPolicy(**_PRECISIONS[case.precision])
    for part in (*model, model):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=case.resharding)
    plan = ShardedPlan(comm_hook=case.compressor, param_hook="int8" if case.gathers_int8 else None)
    sync = ShardedModelSync(plan)
    sync.attach(model, ranks_per_node=1, timeout=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.randn(_STEPS, 16, _WIDTH).add(dist.get_rank()).to(device)
    for step, batch in enumerate(batches):
        loss = model(batch).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sync.end_flush()
        if step < len(case.later):
            sync.change_plan(replace(plan, comm_hook=case.later[step]))
        if case.freezes:
            next(model.parameters()).requires_grad_(False)
    residuals = {} if sync.gradients is None else sync.gradients.residuals()
    whole = [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]
    return Outcome(digest(whole), digest(residuals[name] for name in sorted(residuals)))
