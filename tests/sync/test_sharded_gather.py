"""Parameters that travel as int8 in FSDP2's all-gathers."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_commopt.plan import OptionError
from lightning_commopt.sync.fsdp2.parameters import GatheredParameters
from support.collectives import takes_collectives
from support.warm_ranks import run_ranks

pytestmark = takes_collectives


class _Seen(nn.Module):
    """Keeps what forward computes with."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(37, 51), nn.Conv2d(3, 7, 3)
        self.second.weight.requires_grad_(False)
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {name: p.detach().float().clone() for name, p in self.named_parameters()}
        assert self.second.bias is not None
        return self.first(x).square().mean() + self.second.bias.sum()


def _gathered(options: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor], int, bool]:
    mesh, exact = init_device_mesh("cpu", (dist.get_world_size(),)), dict(_Seen().named_parameters())
    model, gathered = _Seen(), GatheredParameters()
    fully_shard(model, mesh=mesh, **options)
    gathered.attach(model)
    model(torch.ones(2, 37, dtype=options["mp_policy"].param_dtype if options else None)).backward()
    seen, wire_bytes = model.seen, gathered.wire_bytes
    gathered.detach()
    model.reshard()  # type: ignore[operator]
    kept = all(torch.equal(p.full_tensor(), exact[name]) for name, p in model.named_parameters())  # type: ignore[attr-defined]
    model(torch.ones(2, 37, dtype=options["mp_policy"].param_dtype if options else None))
    is_exact_again = bool(options) or all(torch.equal(model.seen[name], p) for name, p in exact.items())
    return {name: p.detach() for name, p in exact.items()}, seen, wire_bytes, kept and is_exact_again


@pytest.mark.parametrize(
    ("options", "world_size"), [({}, 2), ({}, 3), ({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, 2)]
)
def test_matrices_are_rounded_and_vectors_are_not(options: dict[str, Any], world_size: int) -> None:
    """If it fails, ranks compute with different parameters, the optimizer's own are rounded, or vectors are."""
    results = run_ranks(_gathered, options, world_size=world_size)
    for exact, seen, wire_bytes, is_kept in results:
        assert is_kept
        numel = sum(-(-p.shape[0] // world_size) * p.shape[1:].numel() for p in exact.values() if p.dim() > 1)
        vectors = sum(-(-len(p) // world_size) for p in exact.values() if p.dim() == 1)
        message_bytes = -(-numel // 128) * 132 + vectors * (2 if options else 4)
        assert wire_bytes == world_size * message_bytes // 2
        for name, values in exact.items():
            error = (seen[name] - values).abs().max() / values.abs().max()
            if values.dim() == 1 and not options:
                assert error == 0
            else:
                assert 0 < error < 0.01
            assert torch.equal(seen[name], results[0][1][name])


def _tensor_parallel() -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(nn.Linear(4, 4), mesh["tensor"], ColwiseParallel())
    fully_shard(model, mesh=mesh["data"])
    with pytest.raises(OptionError) as caught:
        GatheredParameters().attach(model)
    return str(caught.value)


def test_tensor_parallelism_is_refused() -> None:
    """If it fails, shards of two kinds are taken for one, or a user looks for an option that was not given."""
    for message in run_ranks(_tensor_parallel):
        assert "comm_hook and param_hook work with data parallelism only, but the placements of weight are" in message
