"""The buckets of a plan are those that DDP makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.cost.buckets import buckets_of, layout_of
from lightning_commopt.cost.candidates import caps_for
from lightning_commopt.cost.gradient_times import GradientTimes
from lightning_commopt.plan import CommPlan
from lightning_commopt.plan.ddp import ddp_options
from support.warm_ranks import run_ranks

OPTIONS: list[dict[str, Any]] = [
    {},
    *({"bucket_cap_mb": cap} for cap in (0.01, 0.3, 1, 25)),
    {"bucket_cap_mb": 0.3, "static_graph": True},
    {"bucket_cap_mb": 0.3, "gradient_as_bucket_view": True},
]
LISTS: list[dict[str, Any]] = [{"bucket_cap_mb": caps} for caps in ([0.1, 0.3], [2, 0.01], [0.01, 0.5, 0.01])]


class Net(nn.Module):
    """Its layers are used in another order than they are defined in."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 8)
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))
        self.large = nn.Linear(64, 4096)
        self.back = nn.Linear(4096, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.back(self.large(self.layers(x).relu())))


def buckets_made(model: DistributedDataParallel) -> list[list[str]]:
    """Registers a hook that averages nothing; returns a list of buckets that it appends to."""
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}
    made: list[list[str]] = []

    def note(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        made.append([names[id(parameter)] for parameter in bucket.parameters()])
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    note.__annotations__ = {}
    model.register_comm_hook(None, note)
    return made


def sizes(options: dict[str, Any]) -> tuple[list[list[str]], list[list[str]]]:
    """Returns the parameters in each bucket: expected ones, and those of DDP."""
    net, plan = Net(), CommPlan.from_dict(options)
    times = GradientTimes(net.named_parameters(), torch.device("cpu"))
    model = DistributedDataParallel(net, **plan.ddp_kwargs())
    made = buckets_made(model)
    for _ in range(4):
        made.clear()
        times.begin_backward()
        model(torch.randn(4, 64)).square().mean().backward()
    times.close()
    return [[one.name for one in bucket] for bucket in buckets_of(plan, times.gradients())], made


def all_sizes(options: list[dict[str, Any]]) -> list[Any]:
    return [sizes(one) for one in options]


def test_buckets_are_those_of_ddp() -> None:
    """If it fails, predictions are about other buckets than those that will travel."""
    options = OPTIONS + (LISTS if "bucket_cap_mb_list" in ddp_options() else [])
    for of_rank in run_ranks(all_sizes, options):
        for one, (expected, made) in zip(options, of_rank, strict=True):
            assert [sorted(bucket) for bucket in expected] == [sorted(bucket) for bucket in made], one
            assert len(made) > 1 or one == {"bucket_cap_mb": 25}


def made_as_asked(cut: tuple[int, ...]) -> list[int]:
    net = Net()
    times = GradientTimes(net.named_parameters(), torch.device("cpu"))
    times.begin_backward()
    net(torch.randn(4, 64)).square().mean().backward()
    times.close()
    gradients = times.gradients()
    plan = CommPlan(bucket_cap_mb=caps_for(cut, gradients))
    model = DistributedDataParallel(net, **plan.ddp_kwargs())
    made = buckets_made(model)
    for _ in range(3):
        made.clear()
        model(torch.randn(4, 64)).square().mean().backward()
    return [len(bucket) for bucket in made]


@pytest.mark.skipif("bucket_cap_mb_list" not in ddp_options(), reason="this torch takes no list of caps")
def test_caps_make_the_buckets_that_are_asked_for() -> None:
    """If it fails, a calculated layout is not the one that trains."""
    cut = (1, 4, 2, 30, 9)
    assert run_ranks(made_as_asked, cut) == [[*cut]] * 2


def test_a_bucket_as_compressors_see_it() -> None:
    gradients = GradientTimes(Net().named_parameters(), torch.device("cpu"))
    gradients.begin_backward()
    with pytest.raises(ValueError, match="no backward"):
        gradients.gradients()
    (bucket,) = buckets_of(CommPlan(bucket_cap_mb=1000), [one for one in _gradients() if one.itemsize == 4])
    layout = layout_of(bucket)
    assert layout.numel == sum(parameter.numel() for parameter in Net().parameters())
    assert layout.matrix_sides[0] == (8, 1)


def _gradients() -> Any:
    net = Net()
    times = GradientTimes(net.named_parameters(), torch.device("cpu"))
    times.begin_backward()
    net(torch.randn(4, 64)).sum().backward()
    return times.gradients()
