"""DDP's own all-reduces as hooks of its process group show them, compared with what a comm hook is given."""

import threading
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.callbacks import CommTimeMonitor
from lightning_commopt.compat.torch import registered_hooks
from lightning_commopt.measure.clock import HostClock
from lightning_commopt.measure.observer import END, BucketInfo, BucketSync, BucketSyncs, Observers, SyncObserver
from lightning_commopt.measure.recorder import StepRecorder
from lightning_commopt.sync.ddp.observed import before_backward, observe_all_reduce
from support.collectives import needs_hooks
from support.lightnings import DDPStrategy
from support.strategy_models import Embedded, Params, assert_same, loader, numbers, trainer
from support.warm_ranks import run_ranks

NUM_STEPS = 4
FIRST_BUCKET = 500 * 500 + 500 + 500 + 1  # gradients of the last two layers


class Talkative(nn.Module):
    """All-reduces by itself: in forward as many bytes as the first bucket has, in backward a few."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 500), nn.Linear(500, 500), nn.Linear(500, 1)

    def forward(self, x: Tensor) -> Tensor:
        dist.all_reduce(torch.zeros(FIRST_BUCKET))
        hidden = self.first(x)
        hidden.register_hook(lambda _: dist.all_reduce(torch.zeros(7)))
        result: Tensor = self.last(self.second(hidden))
        return result


Layout = Mapping[int, BucketInfo]
Bucket = tuple[int, int, int, int]


def train(
    options: dict[str, Any], *, by_hook: bool, accumulates: bool = False
) -> tuple[list[tuple[Layout, list[Bucket]]], dict[str, Tensor]]:
    """Returns the layout and the buckets of every step, and the gradients of the last one."""
    torch.manual_seed(dist.get_rank())
    recorder, observers = StepRecorder(HostClock()), Observers()
    observers.add(recorder)
    model = DistributedDataParallel(Talkative(), bucket_cap_mb=0.9, **options)
    with (
        patch("lightning_commopt.sync.ddp.observed.can_observe_reducer", return_value=False)
        if by_hook
        else patch.dict({})
    ):
        observe_all_reduce(model, observers)
    for step in range(NUM_STEPS):
        if accumulates:
            with model.no_sync():
                loss = model(torch.randn(4, 6)).square().mean()
                before_backward(model)
                loss.backward()
        recorder.enter("forward")
        loss = model(torch.randn(4, 6)).square().mean()
        recorder.enter("backward")
        before_backward(model)
        assert bool(registered_hooks(model)) == by_hook
        loss.backward()
        recorder.end_step(step, 4)
    steps = [
        (record.layout, [(b.backward, b.index, b.gradient_bytes, b.wire_bytes) for b in record.buckets])
        for record in recorder.take(NUM_STEPS)
    ]
    return steps, {name: parameter.grad for name, parameter in model.module.named_parameters()}


def train_both(options: dict[str, Any], accumulates: bool = False) -> list[Any]:
    return [train(options, by_hook=by_hook, accumulates=accumulates) for by_hook in (False, True)]


@needs_hooks
@pytest.mark.parametrize(
    ("options", "world_size"),
    [
        ({}, 2),
        ({"static_graph": True, "gradient_as_bucket_view": True}, 2),
        ({"find_unused_parameters": True}, 2),
        ({"gradient_as_bucket_view": True}, 3),  # DDP divides by 3 what is a view of a bucket, and multiplies the rest
    ],
)
def test_it_sees_what_a_hook_is_given(options: dict[str, Any], world_size: int) -> None:
    for (seen, gradients), (given, expected) in run_ranks(train_both, options, world_size=world_size):
        assert seen == given
        assert len(seen[-1][1]) >= 2
        assert all(torch.equal(gradients[name], gradient) for name, gradient in expected.items())


@needs_hooks
def test_an_all_reduce_after_a_backward_without_sync_is_no_bucket() -> None:
    """Such as of gradients that a training step averages itself, or of metrics while gradients are accumulated."""
    for (seen, _), (given, _) in run_ranks(train_both, {}, True):
        assert seen == given
        assert [len(buckets) for _, buckets in seen[1:]] == [2] * (NUM_STEPS - 1)


class FirstEnd(SyncObserver, BucketSync):
    """Knows whether the first bucket of a backward has ended."""

    def __init__(self) -> None:
        self.has_come = threading.Event()

    def ready(self, bucket: BucketInfo) -> BucketSync:
        return self if bucket.index == 0 else BucketSyncs([])

    def note(self, event: int, wire_bytes: int = 0) -> None:
        if event == END:
            self.has_come.set()


def wait_in_backward() -> list[bool]:
    end, waited, observers = FirstEnd(), list[bool](), Observers()
    observers.add(end)
    layers = nn.Sequential(nn.Linear(6, 500), nn.Linear(500, 500), nn.Linear(500, 1))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.9)
    observe_all_reduce(model, observers)
    layers[1].register_full_backward_pre_hook(lambda *_: end.has_come.clear())
    layers[0].register_full_backward_hook(lambda *_: waited.append(end.has_come.wait(10)))
    for _ in range(NUM_STEPS):
        loss = model(torch.randn(4, 6, requires_grad=True)).square().mean()
        before_backward(model)
        loss.backward()
    return waited


@needs_hooks
def test_a_bucket_ends_before_backward_does() -> None:
    """If it fails, each bucket seems to be on the wire until backward has ended."""
    assert [waited[1:] for waited in run_ranks(wait_in_backward)] == [[True] * (NUM_STEPS - 1)] * 2


def fit_embedded() -> tuple[Params, Params, int]:
    monitor, found = CommTimeMonitor(num_warmup_steps=0, print_summary=False), []
    for callbacks in ([], [monitor]):
        torch.manual_seed(0)
        module = Embedded()
        trainer(DDPStrategy(), callbacks=callbacks).fit(module, loader())
        found.append(numbers(module))
    return found[0], found[1], len(monitor.summary)


@pytest.mark.exhaustive
def test_monitoring_sparse_gradients_changes_nothing() -> None:
    """Their tensors do not know how many bytes they have."""
    for unwatched, watched, num_metrics in run_ranks(fit_embedded):
        assert num_metrics > 10
        assert_same(watched, unwatched)
