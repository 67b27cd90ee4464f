"""The best layout is the best of all: against every contiguous layout of small models."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from lightning_commopt.compressors import Compressor, compressor_from_config
from lightning_commopt.cost.buckets import buckets_of
from lightning_commopt.cost.candidates import best_layout, caps_for
from lightning_commopt.cost.compressor_cost import CompressorCost, Stage
from lightning_commopt.cost.predict import jobs_of
from lightning_commopt.cost.workload import Gradient, Workload
from lightning_commopt.measure.link.link import Link
from lightning_commopt.plan import CommPlan
from lightning_commopt.plan.ddp import ddp_options

INT8 = compressor_from_config("int8")
COSTS = {
    INT8: CompressorCost(
        compressor=INT8,
        stages=(Stage(1e-4, 1e-9, "all_to_all", 1.0), Stage(1e-4, 1e-9, "all_gather", 1.0), Stage(0.0, 5e-10)),
    )
}


def layouts(num: int) -> Iterator[tuple[int, ...]]:
    """Yields every way to cut a row of ``num`` gradients."""
    if num == 0:
        yield ()
    for first in range(1, num + 1):
        yield from ((first, *others) for others in layouts(num - first))


def workload(seed: int, num_gradients: int = 9) -> Workload:
    drawn, at_s, gradients = random.Random(seed), 0.0, []
    for index in range(num_gradients):
        at_s += drawn.random() * 0.01
        gradients.append(Gradient(f"p{index}", (drawn.choice((10, 1000, 10**5, 10**6)),), 4, at_s))
    return Workload(gradients=tuple(gradients), forward_s=0.1, backward_s=at_s, rest_s=0.01, num_ranks=2)


def end_of(sizes: tuple[int, ...], small: Workload, link: Link, compressor: Compressor | None) -> float:
    """Returns when the gradient sync of a layout ends: buckets in order, one at a time."""
    end_s, start, plan = 0.0, 0, CommPlan(comm_hook=compressor)
    for size in sizes:
        bucket = small.gradients[start : start + size]
        jobs = jobs_of(plan, [bucket], link, COSTS, small.num_ranks, small.device)
        end_s = max(end_s, bucket[-1].ready_s) + sum(phase.duration_s for job in jobs for phase in job.phases)
        start += size
    return end_s


@pytest.mark.parametrize("compressor", [None, INT8], ids=str)
@pytest.mark.parametrize("hop_s", [0.0, 1e-3, 1e-2])
@pytest.mark.parametrize("s_per_byte", [1e-9, 1e-7])
def test_no_layout_ends_earlier(compressor: Compressor | None, hop_s: float, s_per_byte: float) -> None:
    """If it fails, dynamic programming misses the best of 256 layouts."""
    link = Link(hop_s=hop_s, s_per_byte=s_per_byte)
    small = workload(0)
    ends_s = {sizes: end_of(sizes, small, link, compressor) for sizes in layouts(len(small.gradients))}
    assert len(ends_s) == 256
    found = best_layout(small, link, COSTS, compressor)
    assert ends_s[found] == pytest.approx(min(ends_s.values()), rel=1e-9)


def test_a_slow_start_asks_for_one_bucket_and_a_slow_link_for_more() -> None:
    """If it fails, latency or bandwidth does not count."""
    small = workload(0)
    assert best_layout(small, Link(hop_s=1.0, s_per_byte=1e-9), {}) == (9,)
    assert len(best_layout(small, Link(hop_s=0.0, s_per_byte=1e-7), {})) > 1


@pytest.mark.skipif("bucket_cap_mb_list" not in ddp_options(), reason="this torch takes no list of caps")
def test_caps_make_the_layout() -> None:
    """If it fails, DDP makes other buckets of the caps than were meant."""
    small = workload(1)
    for sizes in layouts(9):
        plan = CommPlan(bucket_cap_mb=caps_for(sizes, small.gradients))
        assert tuple(map(len, buckets_of(plan, small.gradients))) == sizes


def test_many_gradients_are_grouped() -> None:
    """If it fails, a large model takes minutes, or some of its gradients are in no bucket."""
    assert sum(best_layout(workload(2, 200), Link(hop_s=1e-4, s_per_byte=1e-8), {}, max_groups=16)) == 200
