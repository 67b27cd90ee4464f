"""The links of FSDP2: what a probe finds between real ranks, and what follows for training, other rates and ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from lightning_commopt.cost.fsdp2.links import (
    GLOO_RATIOS,
    MAX_STRETCH,
    Line,
    Lines,
    Load,
    ShardLinks,
    probe_shard_links,
)
from lightning_commopt.cost.link_probe import ProbedSize
from lightning_commopt.measure.link.link import PAYLOAD_SHARE
from support.sharded_samples import S_PER_BYTE, line, links
from support.warm_ranks import run_ranks


def probe() -> list[ShardLinks]:
    group = dist.group.WORLD
    assert group is not None
    return [probe_shard_links(group, torch.device("cpu"), max_bytes) for max_bytes in (2**20, 4)]


def test_ranks_probe_all_kinds_of_collectives() -> None:
    """If it fails, ranks enter different collectives at the end of a fit, or a tiny model ends it."""
    for found in itertools.chain(*run_ranks(probe, world_size=3)):
        assert [one.is_ring for one in found.expected] == [True, True, False]
        assert all(one.hop_s > 0 and one.s_per_byte >= 0 for one in found.expected)


@pytest.mark.parametrize(("num_ranks", "is_ring", "num_hops"), [(2, True, 1), (5, True, 4), (5, False, 1)])
def test_the_line_behind_a_probe(num_ranks: int, is_ring: bool, num_hops: int) -> None:
    """If it fails, predictions are off by a constant factor."""
    sizes = [ProbedSize(size, 1e-3 + size * 2e-9, 5e-4 + size * 3e-10) for size in (0, 2**16, 2**24)]
    found = Line.of_probe(sizes, num_ranks, is_ring=is_ring)
    assert found.hop_s == pytest.approx(1e-3 / num_hops)
    for num_bytes in (2**10, 2**26):
        assert found.time_s(num_bytes, num_ranks) == pytest.approx(1e-3 + num_bytes * 2e-9)
        assert found.cpu_s(num_bytes, num_ranks) == pytest.approx(5e-4 + num_bytes * 3e-10)
    assert found.time_s(2**20, 1) == found.time_s(0, num_ranks) == 0.0


def test_more_ranks_mean_more_hops_of_a_ring() -> None:
    ring, direct = line(1, hop_s=1.0), line(1, hop_s=1.0, is_ring=False)
    assert ring.time_s(1, 9) == pytest.approx(8.0, rel=1e-6)
    assert direct.time_s(1, 9) == pytest.approx(1.0, rel=1e-6)


def test_a_faster_link_makes_nothing_slower() -> None:
    """If it fails, a short probe, in which other threads need more processor time than a message takes, shows that a
    run would be slower on a link without a limit."""
    fast = Lines(line(2, cpu_s_per_byte=5e-8), line(3), line(1, is_ring=False, cpu_s_per_byte=4e-8))
    for at_any_rate in (fast.at_rate(1e15, over_gloo=over_gloo) for over_gloo in (False, True)):
        assert all(new.s_per_byte <= now.s_per_byte for new, now in zip(at_any_rate, fast, strict=True))


@pytest.mark.parametrize(("over_gloo", "ratios"), [(True, GLOO_RATIOS), (False, (1.0, 1.0, 1.0))])
def test_where_the_rate_is_the_limit_it_alone_counts(over_gloo: bool, ratios: tuple[float, ...]) -> None:
    """If it fails, tiny messages, or noise in a probe, show steps of many times their length on a slow link."""
    probed = Lines(line(31), line(0.5), line(4, is_ring=False))
    slow = probed.at_rate(1e-2 * 8 / S_PER_BYTE / PAYLOAD_SHARE, over_gloo=over_gloo)
    assert [found.s_per_byte for found in slow] == pytest.approx([100 * S_PER_BYTE * ratio for ratio in ratios])
    slow_core = Lines(line(2, cpu_s_per_byte=5e-9), line(3), line(1, is_ring=False, cpu_s_per_byte=4e-9))
    fast = slow_core.at_rate(8e12, over_gloo=over_gloo)
    assert (fast.all_gather.s_per_byte, fast.exchange.s_per_byte) == (5e-9, 4e-9)
    with pytest.raises(ValueError, match="above 0"):
        probed.at_rate(0, over_gloo=over_gloo)


def test_what_the_run_has_issued_is_known_best() -> None:
    """If it fails, a prediction ignores how loaded the link was, or claims to know what no collective has shown."""
    found = ShardLinks(expected=links().expected).in_training(Load({"all_gather": 1.5}, 1.5, 0.2, 0.1))
    assert found.expected.all_gather.s_per_byte == pytest.approx(3 * S_PER_BYTE)
    half = line(3 * 1.25, hop_s=0.05)  # half of the delay is in proportion, half the same for each collective
    assert found.expected.reduce_scatter == pytest.approx(half)
    assert found.expected.exchange == line(1.25, hop_s=0.05, is_ring=False)
    by_message, in_proportion, *_ = found.others
    assert by_message.exchange == line(1, hop_s=0.1, is_ring=False)
    assert in_proportion.exchange == line(1.5, is_ring=False)
    assert all(other.all_gather == found.expected.all_gather for other in found.others[:4])
    assert len(found.others) == 6


def test_a_collective_is_not_believed_to_take_forever() -> None:
    found = links().expected.in_training(Load({"all_gather": 1e6, "exchange": 1e-6}, 1e6))
    assert found.all_gather.s_per_byte == pytest.approx(MAX_STRETCH * 2 * S_PER_BYTE)
    assert found.exchange.s_per_byte == pytest.approx(S_PER_BYTE / MAX_STRETCH)
    assert found.reduce_scatter.s_per_byte == pytest.approx(MAX_STRETCH * 3 * S_PER_BYTE)
