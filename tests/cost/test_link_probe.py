"""The probe of an idle link: the same sizes on all ranks, and the link that is behind its times."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_commopt.cost import link_probe
from lightning_commopt.cost.link_probe import ProbedSize, link_of_probe, probe_link
from support.warm_ranks import run_ranks

MAX_BYTES = 3 * 2**20


def probe(limit_s: float) -> list[ProbedSize]:
    group = dist.group.WORLD
    assert group is not None
    with patch.object(link_probe, "_MAX_SIZE_S", limit_s):
        return probe_link(group, torch.device("cpu"), MAX_BYTES)


def test_all_ranks_probe_the_same_sizes() -> None:
    """If it fails, ranks enter different collectives, and the fit hangs at its end."""
    probed = run_ranks(probe, math.inf, world_size=3)
    sizes = [[one.num_bytes for one in of_rank] for of_rank in probed]
    assert sizes == [[2**12, 2**16, 2**20, MAX_BYTES]] * 3
    assert all(one.time_s > 0 and one.cpu_s >= 0 for of_rank in probed for one in of_rank)
    assert [len(of_rank) for of_rank in run_ranks(probe, 0.0, world_size=3)] == [1] * 3, "the next one takes too long"


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_the_link_behind_a_probe(num_ranks: int) -> None:
    """If it fails, what a compressed run says of an uncompressed one is off by a constant factor."""
    latency_s, s_per_byte, cpu_s_per_byte = 1e-3, 2e-9, 3e-10
    sizes = [
        ProbedSize(num_bytes, latency_s + num_bytes * s_per_byte, num_bytes * cpu_s_per_byte)
        for num_bytes in (0, 2**16, 2**24)
    ]
    link = link_of_probe(sizes, num_ranks)
    for num_bytes in (2**10, 2**26):
        assert link.time_s("all_reduce", num_bytes, num_ranks) == pytest.approx(latency_s + num_bytes * s_per_byte)
    assert link.cpu_s("all_reduce", 2**20, num_ranks) == pytest.approx(2**20 * cpu_s_per_byte)


def test_noise_makes_no_negative_rate() -> None:
    link = link_of_probe([ProbedSize(2**12, 3e-3, 1e-3), ProbedSize(2**16, 2e-3, 5e-4)], 2)
    assert link.s_per_byte == link.cpu_s_per_byte == 0
    assert link.time_s("all_reduce", 2**20, 2) == pytest.approx(2e-3)
