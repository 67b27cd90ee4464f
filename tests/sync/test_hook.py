"""BucketHook: overlap with backward, order of collectives, failures."""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compressors import AllReduce, BlockInt8, Compressor, Layout, PowerSGD, Rounds, State
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.measure.clock import HostClock
from lightning_commopt.measure.observer import Observers
from lightning_commopt.measure.record import StepRecord
from lightning_commopt.measure.recorder import StepRecorder
from lightning_commopt.sync.ddp.attach import attach_bucket_hook, warn_of_launch_order
from lightning_commopt.sync.ddp.buckets import synced_parameters
from lightning_commopt.sync.ddp.hook import BucketHook
from lightning_commopt.sync.executors import WorkerThread
from lightning_commopt.text import validation
from support.own_compressors import Averages
from support.ranks import run_ranks_or_raise
from support.warm_ranks import run_ranks

_SYNC_HAS_STARTED = threading.Event()
_BACKWARD_REACHED_THE_INPUT = threading.Event()


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))


@dataclass(frozen=True, kw_only=True)
class _WaitsForBackward(Averages):
    """Does not finish the first bucket before backward has reached the first layer."""

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        _SYNC_HAS_STARTED.set()
        assert _BACKWARD_REACHED_THE_INPUT.wait(20), "backward stood still while a bucket was synchronized"
        yield from super().rounds(flat, layout, {}, channel)


def _overlap() -> StepRecord:
    model = DistributedDataParallel(_model(), bucket_cap_mb=0.003)
    recorder, observers = StepRecorder(HostClock()), Observers()
    observers.add(recorder)
    hook = attach_bucket_hook(model, _WaitsForBackward(), None, observers=observers)

    def reach_the_input(gradient: Tensor) -> None:
        assert _SYNC_HAS_STARTED.wait(20), "no bucket was synchronized before the last one was ready"
        _BACKWARD_REACHED_THE_INPUT.set()

    model.module[0].weight.register_hook(reach_the_input)
    for step in range(2):
        if step == 0:  # DDP makes its buckets after the first step
            _SYNC_HAS_STARTED.set()
        else:
            _SYNC_HAS_STARTED.clear()
        _BACKWARD_REACHED_THE_INPUT.clear()
        recorder.enter("backward")
        model(torch.randn(4, 32)).sum().backward()
        recorder.end_step(step, 4)
    hook.close()
    return recorder.take(2)[-1]


def test_backward_goes_on_during_a_gradient_sync() -> None:
    """If it fails, buckets are synchronized while backward waits, and overlap is lost."""
    for record in run_ranks(_overlap):
        first, *others, last = record.buckets
        assert len(others) >= 2
        assert first.start_s < last.ready_s
        assert all(bucket.ready_s < first.end_s for bucket in others)


class _Collective(nn.Sequential):
    """Has collectives in the middle of backward on the default group, as SyncBatchNorm issues them."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
            x.register_hook(self._average)
        return x

    def _average(self, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()


def _own_collectives() -> tuple[float, float]:
    model = DistributedDataParallel(_Collective(*_model()), bucket_cap_mb=0.005)
    hook = attach_bucket_hook(model, PowerSGD(), None)
    torch.manual_seed(dist.get_rank())  # so that gradients are equal only if they were averaged
    x = torch.randn(4, 32)
    for _ in range(20):
        model.zero_grad()
        model(x).pow(2).sum().backward()
    hook.close()
    gradient = model.module[0].weight.grad
    return float(gradient.sum()), float(gradient.abs().max())


def test_collectives_of_the_main_thread_do_not_mix() -> None:
    """If it fails, SyncBatchNorm or a metric in backward pairs with a bucket of another rank: garbage or a hang."""
    first, second = run_ranks(_own_collectives)
    assert first == second
    assert 0 < first[1] < float("inf")


@dataclass(frozen=True, kw_only=True)
class _FailsOnce(Averages):
    """Raises on one rank, in the second bucket of the second step."""

    def init(self, layout: Layout, device: torch.device, step: int = 0) -> State:
        return {"step": step}

    def rounds(
        self, flat: Tensor, layout: Layout, state: State, channel: Channel, residual: Tensor | None = None
    ) -> Rounds:
        state["step"] += 1
        if dist.get_rank() == 1 and state["step"] == 3 and torch.Size([32, 32]) in layout.shapes:
            raise ArithmeticError("no luck")
        yield from super().rounds(flat, layout, {}, channel)


def _fail() -> None:
    model = DistributedDataParallel(_model(), bucket_cap_mb=0.005)
    attach_bucket_hook(model, _FailsOnce(), None)
    for _ in range(5):
        model(torch.randn(4, 32)).sum().backward()


def test_a_failure_surfaces_with_its_bucket() -> None:
    """If it fails, an error in a compressor hangs the run, or says nothing of where it happened."""
    (_, on_first), (_, on_second) = run_ranks_or_raise(_fail, world_size=2, group_timeout_s=30)
    assert on_second is not None
    assert "gradient sync of bucket 0 failed (ArithmeticError: no luck)" in on_second
    assert "its parameters: 5.bias, 5.weight" in on_second
    assert re.search(r"test_hook\.py\(\d+\): rounds", on_second)
    assert on_first is not None
    assert "gradient sync of bucket" in on_first


class _Ignoring(nn.Module):
    """Has a parameter that DDP ignores, and two that it is asked to ignore under names that it does not use."""

    num_synced = 5

    def __init__(self) -> None:
        super().__init__()
        self.of_root = nn.Parameter(torch.ones(8))
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        self.layers[2].weight = self.layers[1].weight
        self._ddp_params_and_buffers_to_ignore = ["of_root", "layers.0.bias", "layers.1.weight"]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x * self.of_root)


class _WithEmpty(nn.Module):
    """Has a parameter without elements, which is alone in its bucket because of its dtype."""

    num_synced = 3

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.empty = nn.Linear(8, 32), nn.Parameter(torch.zeros(0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum(1) + self.empty.sum()


class _Sparse(nn.Module):
    """Has an embedding whose gradients are sparse."""

    num_synced = 1

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.EmbeddingBag(16, 4, sparse=True, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        return self.embeddings(x.abs().mul(10).long() % 16)


def _gradients(model_class: type[nn.Module], compressor: Compressor) -> list[list[Tensor]]:
    """Returns the last of three gradients of each parameter as DDP averages them, and with a hook."""
    found = []
    for hooked in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(model_class(), bucket_cap_mb=0.0001)
        assert len(synced_parameters(model)) == model.module.num_synced
        hook = attach_bucket_hook(model, compressor, None) if hooked else None
        torch.manual_seed(dist.get_rank())
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(4, 8)).pow(2).sum().backward()
        found.append([parameter.grad.to_dense() for parameter in model.module.parameters()])
        if hook:
            assert hook.state().num_syncs == 3
            hook.close()
    return found


@pytest.mark.parametrize(
    ("model_class", "compressor", "tolerance"),
    [
        pytest.param(_Sparse, PowerSGD(), 1e-6, id="sparse gradients travel uncompressed"),
        pytest.param(_Ignoring, AllReduce(), 0.0, id="what DDP is to ignore stays out and the rest is synchronized"),
        pytest.param(_WithEmpty, BlockInt8(), 0.02, id="a bucket without elements is no error"),
    ],
)
def test_models_that_train_with_ddp(model_class: type[nn.Module], compressor: Compressor, tolerance: float) -> None:
    """If it fails, a model ends with an error, or with other gradients, because of a comm_hook."""
    for native, hooked in run_ranks(_gradients, model_class, compressor):
        assert any(gradient.any() for gradient in native)
        for expected, gradient in zip(native, hooked, strict=True):
            assert gradient.shape == expected.shape
            assert (gradient - expected).norm() <= tolerance * expected.norm()


class _BesideSparse(nn.Module):
    """Adds an embedding to a layer's output, so that the layer's gradients are computed from those of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.table = nn.Embedding(16, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.table(x[:, 0].abs().mul(10).long() % 16)


def _average_and_gradient() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    module = _BesideSparse()
    model = DistributedDataParallel(module)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(4, 8)
    (average,) = torch.autograd.grad(module(x).pow(2).sum(), [module.layer.bias])
    dist.all_reduce(average.div_(2))
    model(x).pow(2).sum().backward()
    gradient = module.layer.bias.grad
    assert gradient is not None
    return average, gradient


def test_ddp_divides_gradients_beside_a_sparse_one_twice() -> None:
    """If it fails, torch has mended this: `separate_sparse_gradients` and what docs/how_to/ddp.md says of it can go."""
    for average, gradient in run_ranks(_average_and_gradient):
        torch.testing.assert_close(gradient, average / 2)


def test_several_communicators_at_a_time_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a model with SyncBatchNorm deadlocks on CUDA under `hierarchical`, and nobody has been told why."""
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    warn_of_launch_order(nn.Sequential(nn.BatchNorm1d(4)))
    with pytest.warns(UserWarning, match="set NCCL_LAUNCH_ORDER_IMPLICIT=1"):
        warn_of_launch_order(nn.Sequential(nn.SyncBatchNorm(4)))
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    validation.warn_once.cache_clear()
    warn_of_launch_order(nn.Sequential(nn.SyncBatchNorm(4)))


def _received_with_residuals(compressor: Compressor) -> list[Tensor]:
    """Returns the averages of two steps whose gradients are zero, before which residuals are added."""
    model = DistributedDataParallel(nn.Linear(3, 2))
    hook, received = attach_bucket_hook(model, compressor, None), []
    hook.add_residuals({"weight": torch.full((2, 3), 1.0 + dist.get_rank()), "bias": torch.ones(2)})
    for _ in range(2):
        model.zero_grad()
        model(torch.zeros(1, 3)).sum().mul(0).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        received.append(torch.cat([gradient.flatten() for gradient in gradients]))
    hook.close()
    return received


@pytest.mark.parametrize("compressor", [AllReduce(), PowerSGD()])
def test_residuals_of_another_hook_are_sent_once(compressor: Compressor) -> None:
    """If it fails, what a change of the plan has left is lost, or added to the gradients of every step."""
    for first, second in run_ranks(_received_with_residuals, compressor):
        assert first.tolist() == [1.5] * 6 + [1.0] * 2
        assert not second.any()


@dataclass(frozen=True, kw_only=True)
class _KnowsItsStep(Averages):
    """Has a state that tells in which step it was made."""

    def init(self, layout: Layout, device: torch.device, step: int = 0) -> State:
        return {"step": step}


def _steps_of_states() -> tuple[int, set[int]]:
    model = DistributedDataParallel(_model(), bucket_cap_mb=0.005)
    hook = attach_bucket_hook(model, _KnowsItsStep(), None)
    hook.resume({}, {}, 7)
    for _ in range(3):
        model(torch.randn(4, 32)).sum().backward()
    state = hook.state()
    hook.close()
    return state.num_syncs, {made["step"] for _, _, made in state.buckets.values()}


def test_states_are_made_with_the_number_of_steps_before() -> None:
    """If it fails, a late start begins anew, and seeds repeat, when DDP rebuilds its buckets or a fit is resumed."""
    assert run_ranks(_steps_of_states) == [(10, {8})] * 2  # DDP has rebuilt its buckets after the first step


def _succeed() -> None:
    pass


def _raise() -> None:
    raise ArithmeticError("no luck")


@pytest.mark.parametrize(("task", "num_returned"), [(_succeed, 1), (_raise, 0)])
def test_groups_are_not_used_again_after_a_failure(task: Callable[[], None], num_returned: int) -> None:
    """If it fails, the next fit pairs its messages with those of a gradient sync that did not end."""
    executor, groups, channel = WorkerThread(), mock.Mock(), mock.Mock()
    hook = BucketHook(AllReduce(), channel, {}, executor, groups=groups)
    executor.submit(task, [])
    hook.close()
    assert groups.return_to_pool.call_count == num_returned


def _closed_groups() -> list[Any]:
    counts = []
    for _ in range(3):
        model = DistributedDataParallel(_model())
        hook = attach_bucket_hook(model, PowerSGD(), None)
        model(torch.randn(4, 32)).sum().backward()
        assert isinstance(hook, BucketHook)
        hook.close()
        workers = [thread for thread in threading.enumerate() if thread.name == "commopt-gradient-sync"]
        counts.append((len(dist.distributed_c10d._world.pg_map), len(workers)))
    return counts


def test_close_leaves_nothing() -> None:
    """If it fails, every fit leaks a thread or a process group."""
    for counts in run_ranks(_closed_groups):
        assert counts == [(2, 0)] * 3  # the default group, and one that the hooks take in turn
