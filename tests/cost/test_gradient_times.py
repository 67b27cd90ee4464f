"""GradientTimes: each gradient in the order of backward, with every model that DDP trains."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_commopt.cost import gradient_times
from lightning_commopt.cost.gradient_times import GradientTimes, interrupts
from lightning_commopt.cost.shared_core import NO_INTERRUPTS, Interrupts


def _work(seconds: float) -> None:
    """Computes for so much of its thread's processor time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class Slow(torch.autograd.Function):
    """Takes its time in backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        _work(0.02)
        return gradient


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Slow.apply(self.frozen(self.first(x))))


def recorded(net: Net, num_backwards: int = 3) -> GradientTimes:
    times = GradientTimes(net.named_parameters(), torch.device("cpu"))
    for _ in range(num_backwards):
        times.begin_backward()
        net(torch.randn(2, 4)).sum().backward()
    times.close()
    return times


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Lets torch compute in two threads."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("two_threads")
def test_gradients_in_the_order_of_backward() -> None:
    """If it fails, buckets begin too early or too late in predictions."""
    gradients = recorded(Net()).gradients()
    names = [one.name for one in gradients]
    assert {*names[:2]} == {"second.weight", "second.bias"}
    assert {*names[2:4]} == {"first.weight", "first.bias"}
    assert names[4:] == ["unused.weight", "unused.bias"]
    assert gradients[2].ready_s - gradients[1].ready_s > 0.02
    assert gradients[-1].ready_s == gradients[3].ready_s
    assert (gradients[0].itemsize, sum(one.num_bytes for one in gradients)) == (4, 4 * 60)


def test_hooks_are_removed() -> None:
    net = Net()
    times = recorded(net)
    net(torch.randn(2, 4)).sum().backward()
    assert times.num_backwards == 3
    assert not any(parameter._post_accumulate_grad_hooks for parameter in net.parameters())


def test_waiting_is_no_computation() -> None:
    """With one thread a gradient is ready after the work, however long another process or thread had the core."""
    net = Net()
    times = GradientTimes(net.named_parameters(), torch.device("cpu"))
    times.begin_backward()
    net.second.weight.register_hook(lambda gradient: time.sleep(0.3))
    net(torch.randn(2, 4)).sum().backward()
    assert times.gradients()[-1].ready_s < 0.2


def test_work_of_other_threads_is_counted() -> None:
    """If it fails, predictions have a gradient sync on the same core as backward that takes nothing from it."""
    times = GradientTimes((), torch.device("cpu"))
    assert times.comm_cpu_s == 0
    for _ in range(3):
        times.begin_backward()
        thread = threading.Thread(target=_work, args=(0.02,))
        thread.start()
        thread.join()
    assert times.comm_cpu_s > 0.019


def test_the_core_of_gradient_sync_where_no_affinity_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a fit on macOS ends with an error, as only Linux has ``os.sched_getaffinity``."""
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert [GradientTimes((), torch.device("cpu"), ranks).shares_core for ranks in (3, 4)] == [False, True]


def test_interrupts_of_the_own_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, interrupts of other cores count, or a system that does not count them ends a fit."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 10}, raising=False)
    monkeypatch.setattr(os, "sysconf", lambda _: 100)
    monkeypatch.setattr(gradient_times, "_STAT", tmp_path / "stat")
    assert interrupts() == NO_INTERRUPTS
    rows = ("cpu 9 0 9 9 0 8 60", "cpu0 9 0 9 9 0 8 10", "cpu1 9 0 9 9 0 0 20", "cpu10 9 0 9 9 0 0 30")
    (tmp_path / "stat").write_text("\n".join(rows))
    assert interrupts() == pytest.approx(Interrupts(0.24, False))
    (tmp_path / "stat").write_text("cpu 9 0\n")
    assert interrupts() == NO_INTERRUPTS


def test_before_a_backward() -> None:
    with pytest.raises(ValueError, match="no backward"):
        recorded(Net(), num_backwards=0).gradients()
