"""Models that differ between ranks when a fit begins."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_commopt.sync.diloco.equalize import equalize
from support.ranks import run_ranks


def _equalize_layers() -> list[list[float]]:
    rank = dist.get_rank()
    with pytest.raises(ValueError, match=r"same model, got a parameter of shapes \[\(2,\), \(3,\)\]"):
        equalize([nn.Parameter(torch.ones(2 + rank))])
    with pytest.raises(ValueError, match="lazy modules without parameters: run a forward in setup"):
        equalize([*nn.LazyLinear(2).parameters()])
    with pytest.raises(ValueError, match=r"layout torch.sparse_csr and shape \(3, 3\).* as a plain attribute"):
        equalize([torch.ones(2), torch.eye(3).to_sparse_csr()])
    alike, other, cache = torch.ones(3), torch.full((2,), float(rank)), torch.full((rank, 2), 7.0)
    equalize([alike, other, cache, torch.ones(1 - rank, 2)])
    return [alike.tolist(), other.tolist(), cache.tolist()]


def test_all_ranks_get_the_tensors_of_the_first() -> None:
    """If it fails, ranks begin with different models, or those that cannot be equal end without a reason."""
    assert run_ranks(_equalize_layers) == [[[1.0] * 3, [0.0] * 2, []]] * 2
