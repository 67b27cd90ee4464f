"""Laws that hold for every compressor."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.commands.selftest.checks import check
from lightning_commopt.commands.selftest.gradients import Net, flatten, random_gradients, send
from lightning_commopt.commands.selftest.places import TestDevices
from lightning_commopt.compressors import Compressor, compressor_from_config
from lightning_commopt.compressors.registry import compressor_names
from lightning_commopt.plan import CommPlan
from lightning_commopt.sync.gradient_sync import GradientSync
from lightning_commopt.sync.state import CommState

_NUM_STEPS = 8
_ATOL_LOSSLESS = 1e-5


def all_compressors() -> dict[str, Compressor]:
    """Returns every registered compressor with its defaults; those that wrap another one wrap bf16."""
    found = {}
    for name in compressor_names():
        config: dict[str, Any] = {"name": name}
        try:
            compressor = compressor_from_config(config)
        except (TypeError, ValueError):
            compressor = compressor_from_config({**config, "inner": "bf16", **_REQUIRED.get(name, {})})
        if compressor is not None:
            found[name] = compressor
    return found


_REQUIRED: dict[str, dict[str, Any]] = {"after_steps": {"start_step": 2}, "by_size": {"min_numel": 100}}


class _Steps(NamedTuple):
    """What went through a compressor: in float64 on the CPU, step by step.

    Attributes:
        sent: ``(steps, n)`` this rank's gradients.
        received: ``(steps, n)`` averages.
        residual: ``(n,)`` of this rank, at the end.
        bytes_per_step: handed to collectives, in the mean of the last two steps.
        declared_bytes: that the compressor says it sends.
    """

    sent: Tensor
    received: Tensor
    residual: Tensor
    bytes_per_step: float
    declared_bytes: int


def wrap(place: TestDevices, compressor: Compressor | None) -> tuple[DistributedDataParallel, GradientSync]:
    """Returns a model in DDP, synchronized by a compressor."""
    model = DistributedDataParallel(Net().to(place.device(dist.get_rank())))
    sync = GradientSync(CommPlan(comm_hook=compressor))
    sync.attach(model, timeout=None, ranks_per_node=1)  # as if on two nodes, for the hierarchical compressor
    return model, sync


def gradients_of(place: TestDevices, step: int, scale: float = 1.0) -> dict[str, Tensor]:
    """Returns random gradients of this rank, on its device."""
    device = place.device(dist.get_rank())
    return {name: value.to(device) for name, value in random_gradients(step, dist.get_rank(), scale).items()}


def run_step(
    place: TestDevices, model: DistributedDataParallel, sync: GradientSync, step: int, scale: float = 1.0
) -> Tensor:
    """Sends this rank's gradients of a step, and returns their average, ``(n,)`` float64."""
    average = send(model, gradients_of(place, step, scale))
    sync.end_backward(ends_static_graph=False)
    return flatten(average)


def _run_steps(place: TestDevices, compressor: Compressor) -> _Steps:
    model, sync = wrap(place, compressor)
    received, byte_counts = [], [0]
    for step in range(_NUM_STEPS):
        received.append(run_step(place, model, sync, step))
        byte_counts.append(sync.wire_bytes)
    sent = [flatten(random_gradients(step, dist.get_rank())) for step in range(_NUM_STEPS)]
    assert sync.hook is not None
    layouts = [layout for _, layout, _ in sync.hook.state().buckets.values()]
    declared = sum(sync.hook.compressor.wire_bytes(layout, dist.get_world_size()) for layout in layouts)
    left = sync.detach()
    residual = {name: left.get(name, torch.zeros_like(value)) for name, value in Net().named_parameters()}
    per_step = (byte_counts[-1] - byte_counts[-3]) / 2  # alternating compressors send one factor, then the other
    return _Steps(torch.stack(sent), torch.stack(received), flatten(residual), per_step, declared)


def _of_all_ranks(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def each_compressor() -> Iterator[tuple[str, Compressor]]:
    """Yields the name and the compressor of `all_compressors`."""
    yield from all_compressors().items()


@check("averages are those in float64, within each compressor's error")
def _averages(place: TestDevices) -> str:
    for name, compressor in each_compressor():
        steps = _run_steps(place, compressor)
        mean = torch.stack(_of_all_ranks(steps.sent)).mean(0)
        residual = torch.stack(_of_all_ranks(steps.residual)).mean(0)
        check_averages(name, compressor, steps.received, mean, residual)
    return f"{len(all_compressors())} compressors, {_NUM_STEPS} steps each"


def check_averages(name: str, compressor: Compressor, received: Tensor, exact: Tensor, residual: Tensor) -> None:
    """Checks averages of normally distributed gradients against what the compressor claims of its error.

    Args:
        name: for messages.
        compressor: that made the averages, from a fresh state.
        received: ``(steps, n)`` averages.
        exact: ``(steps, n)`` what they should be.
        residual: ``(n,)`` at the end, the mean over the ranks; zero where no residual is kept.

    Raises:
        AssertionError: an average is off by more than is claimed, or a lossy compressor claims nothing.
    """
    if not compressor.is_lossy:
        error = (received - exact).abs().max().item()
        assert error <= _ATOL_LOSSLESS, f"{name}: off by up to {error:.3g}, but it is not lossy"
        return
    bound = compressor.error_bound
    assert bound is not None, (
        f"{name}: is lossy and declares no error_bound, so nothing can be checked. Declare in the class how far an"
        " average may be off, as a share of its 2-norm: see Compressor.error_bound"
    )
    num_steps = 1 if compressor.keeps_residual else len(exact)  # the first average is without a residual
    errors = (received - exact).norm(dim=1) / exact.norm(dim=1)
    worst = errors[:num_steps].max().item()
    assert worst < bound, f"{name}: an average is off by {worst:.3g} in the 2-norm, its error_bound is {bound:.3g}"
    if compressor.keeps_residual:
        lost = ((received.sum(0) + residual - exact.sum(0)).norm() / exact.norm(dim=1).sum()).item()
        bound = compressor.untracked_error
        assert lost < bound, (
            f"{name}: {lost:.3g} of the gradients is neither in the averages nor in the residual, its untracked_error"
            f" is {bound:.3g}"
        )


@check("all ranks receive the same bits")
def _ranks_agree(place: TestDevices) -> str:
    for name, compressor in each_compressor():
        first, *others = _of_all_ranks(_run_steps(place, compressor).received)
        assert all(torch.equal(first, other) for other in others), f"{name}: ranks differ"
    return f"{len(all_compressors())} compressors"


@check("bytes on the wire are those that a compressor declares")
def _bytes(place: TestDevices) -> str:
    for name, compressor in each_compressor():
        steps = _run_steps(place, compressor)
        assert steps.bytes_per_step == steps.declared_bytes, (
            f"{name}: {steps.bytes_per_step:.0f} bytes a step, declared {steps.declared_bytes}"
        )
    return f"{len(all_compressors())} compressors"


@check("lossless compressors train to the same bits as DDP")
def _lossless(place: TestDevices) -> str:
    trained = {}
    lossless = {name: compressor for name, compressor in each_compressor() if not compressor.is_lossy}
    for name, compressor in {"DDP": None, **lossless}.items():
        model, sync = wrap(place, compressor)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(_NUM_STEPS):
            run_step(place, model, sync, step)
            optimizer.step()
        trained[name] = flatten(dict(model.module.named_parameters()))
        sync.detach()
    for name, parameters in trained.items():
        assert torch.equal(parameters, trained["DDP"]), f"{name}: differs from DDP"
    return ", ".join(lossless)


@check("a step that overflows does not poison the next ones")
def _overflow(place: TestDevices) -> str:
    for name, compressor in each_compressor():
        model, sync = wrap(place, compressor)
        for step, scale in enumerate((1.0, float("inf"), 1.0, 1.0)):
            received = run_step(place, model, sync, step, scale)
        assert received.isfinite().all(), f"{name}: not finite two steps later"
        sync.detach()
    return f"{len(all_compressors())} compressors"


@check("a resumed compressor goes on bit for bit")
def _resume(place: TestDevices) -> str:
    for name, compressor in each_compressor():
        model, sync = wrap(place, compressor)
        half = _NUM_STEPS // 2
        for step in range(half):
            run_step(place, model, sync, step)
        state = sync.state()
        saved = copy.deepcopy(state.on_cpu()) if state is not None else CommState()
        expected = [run_step(place, model, sync, step) for step in range(half, _NUM_STEPS)]
        sync.detach()
        model, sync = wrap(place, compressor)
        sync.restore(saved)
        sync.resume(model.module)
        for step in range(half, _NUM_STEPS):
            received = run_step(place, model, sync, step)
            assert torch.equal(received, expected[step - half]), f"{name}: differs in step {step}, resumed from {half}"
        sync.detach()
    return f"{len(all_compressors())} compressors"
