"""What is measured of a compressor alone is what it does in training."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from lightning_commopt.compressors import Hierarchical, Rounds
from lightning_commopt.compressors.channel import Pending
from lightning_commopt.cost import compressor_cost
from lightning_commopt.cost.compressor_cost import CompressorCost, measure_costs, time_rounds
from lightning_commopt.cost.workload import Gradient
from lightning_commopt.measure.clock import HostClock
from support.every_compressor import COMPRESSORS

GRADIENTS = [Gradient("w", (300, 200), 4, 0.1), Gradient("b", (300,), 4, 0.2)]
NAMES = ("after_steps", "bf16", "bf16_in_float32", "by_size", "error_feedback", "example_topk", "int4", "int8")
IN_ONE_GROUP = {name: COMPRESSORS[name] for name in (*NAMES, "powersgd", "powersgd_rank_2", "alternating_powersgd")}


@pytest.fixture(scope="module")
def costs() -> dict[str, CompressorCost]:
    with mock.patch.object(compressor_cost, "LARGE_BYTES", 2**20):
        found = measure_costs(IN_ONE_GROUP.values(), GRADIENTS, torch.device("cpu"), 2)
    assert found.keys() == {*IN_ONE_GROUP.values()}
    return {name: found[one] for name, one in IN_ONE_GROUP.items()}


@pytest.mark.parametrize("name", IN_ONE_GROUP)
def test_messages_add_up_to_what_is_sent(name: str, costs: dict[str, CompressorCost]) -> None:
    """If it fails, a message is missing, or counts twice."""
    stages = costs[name].stages
    assert sum(s.share * (1.0 if s.operation == "all_reduce" else 0.5) for s in stages) == pytest.approx(1.0)
    assert stages[-1].operation == ""
    assert all(stage.operation for stage in stages[:-1])
    assert costs[name].compute_s(10**7) > 0


def test_rounds_are_those_of_the_algorithm(costs: dict[str, CompressorCost]) -> None:
    operations = {name: [stage.operation for stage in costs[name].stages[:-1]] for name in costs}
    assert operations["bf16"] == ["all_reduce"]
    assert operations["int8"] == ["all_to_all", "all_gather"]
    assert operations["powersgd"] == ["all_reduce", "all_reduce"]
    first, second = costs["int8"].stages[:-1]
    assert first.share == second.share == 1.0  # as much to all ranks as from all of them


def test_json_keeps_everything(costs: dict[str, CompressorCost]) -> None:
    for name in ("bf16", "int8", "powersgd_rank_2"):
        assert CompressorCost.from_plain(costs[name].to_plain()) == costs[name]


def test_what_needs_nodes_is_left_out() -> None:
    """If it fails, a compressor that cannot be tried alone ends a fit."""
    hierarchical = Hierarchical(inner=COMPRESSORS["bf16"])
    assert measure_costs([hierarchical, None], GRADIENTS, torch.device("cpu"), 2).keys() == {None}


def test_training_does_not_notice() -> None:
    """If it fails, measuring compressors in a fit changes its random numbers."""
    before = torch.get_rng_state()
    with mock.patch.object(compressor_cost, "LARGE_BYTES", 2**18):
        measure_costs([COMPRESSORS["powersgd"], COMPRESSORS["int8"]], GRADIENTS, torch.device("cpu"), 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_buckets_take_turns() -> None:
    """If it fails, the memory of a bucket is in the caches as it never is in training."""
    calls = []

    def rounds(name: str, num_collectives: int) -> Rounds:
        for number in range(num_collectives):
            calls.append((name, number))
            yield Pending(torch.zeros(1), [])
        calls.append((name, num_collectives))

    times = time_rounds([rounds("large", 2), rounds("small", 1)], HostClock())
    assert calls == [("large", 0), ("small", 0), ("large", 1), ("small", 1), ("large", 2)]
    assert [len(seconds) for seconds in times] == [3, 2]


def test_a_scratch_bucket_has_the_gradients_in_their_order() -> None:
    """If it fails, matrices begin where a cache line does, as they do not behind a bias of ten elements."""
    layouts, make = [], compressor_cost._ScratchBucket

    def spy(compressor: Any, layout: Any, *rest: Any) -> Any:
        layouts.append(layout)
        return make(compressor, layout, *rest)

    gradients = [Gradient("bias", (10,), 4, 0.1), *GRADIENTS]
    with mock.patch.multiple(compressor_cost, _ScratchBucket=spy, LARGE_BYTES=2**18):
        measure_costs([COMPRESSORS["bf16"]], gradients, torch.device("cpu"), 2)
    assert {layout.shapes for layout in layouts} == {((256, 256),), ((10,), (300, 200), (300,))}
