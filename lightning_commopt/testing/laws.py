"""Laws that hold for every compressor of DDP's buckets; `check_compressor` and ``commopt selftest`` check them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_commopt.compressors import Compressor, Layout
from lightning_commopt.compressors.base import finish
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.sync.gather import values_of_all_ranks
from lightning_commopt.testing.law import Holds, Law
from lightning_commopt.testing.steps import (
    NUM_STEPS,
    Setup,
    Vectors,
    in_bucket,
    random_gradients,
    run_steps,
)

# The largest gradients are about 5, and sums in another order differ by a few of float32's epsilons of 1.2e-7.
_ATOL_LOSSLESS = 1e-5
_SCALES = (0.0, 1e-20, 1e4)  # no scale at all; squares below float32's range; values near fp16's largest, 65504

_LAWS: dict[str, Law] = {}
LAWS: Mapping[str, Law] = MappingProxyType(_LAWS)
"""The laws for a `Compressor` by their names, in the order in which they are checked."""


def law(statement: str, consequence: str, laws: dict[str, Law] = _LAWS) -> Callable[[Holds], Law]:
    """Makes a law of a function, and adds it to ``laws`` under the function's name."""

    def add(holds: Holds) -> Law:
        laws[holds.__name__] = Law(holds.__name__, statement, consequence, holds)
        return laws[holds.__name__]

    return add


_STEPS_ALONE = {
    "random gradients": 1.0,
    "zeros on the last rank": 0.0,
    "other random gradients": 1.0,
    "NaN on the last rank": torch.nan,
    "finite gradients after NaN": 1.0,
}
"""What the gradients are, and the factor of the last rank's gradients."""


@law(
    "all ranks issue the same collectives, whatever their gradients are",
    "ranks wait for each other forever, or add up messages that do not belong together",
)
def same_collectives(setup: Setup, name: str, compressor: Any) -> None:
    """Runs the compressor alone, as if the other ranks sent what this one does, so that no rank can wait in vain."""
    is_last, run_alone = dist.get_rank() == dist.get_world_size() - 1, setup.alone(compressor)
    issued, error = None, None
    for step, (description, factor) in enumerate(_STEPS_ALONE.items()):
        try:
            issued = run_alone(setup.gradients(step, factor if is_last else 1.0))
        except Exception as raised:
            error = raised
        every: list[Any] = values_of_all_ranks(issued)
        if error is not None:
            raise error
        if None in every:
            return  # the rank that has raised reports it
        for other, theirs in enumerate(every):
            difference = _first_difference(every[0], theirs, other)
            assert not difference, f"{name}: in a step with {description} {difference}"


def _first_difference(first: list[str], theirs: list[str], rank: int) -> str:
    """Returns where two ranks issue different collectives, in words; "" if they do not."""
    for index in range(max(len(first), len(theirs))):
        ours, other = (issued[index] if index < len(issued) else "none" for issued in (first, theirs))
        if ours != other:
            return f"collective {index + 1} is {ours} on rank 0, {other} on rank {rank}"
    return ""


@law(
    "averages are those in float64, within each compressor's error",
    "training ends with a worse loss than the class lets expect: the optimizer gets other gradients, or error feedback"
    " loses a part of them for good",
)
def averages(setup: Setup, name: str, compressor: Compressor) -> None:
    """Holds a compressor to its claims: how far averages are off, and what error feedback loses."""
    steps = run_steps(setup, compressor)
    exact = torch.stack(values_of_all_ranks(steps.sent)).mean(0)
    residual = torch.stack(values_of_all_ranks(steps.residual)).mean(0)
    received, claims = steps.received, compressor.claims
    if not claims.is_lossy:
        error = (received - exact).abs().max().item()
        assert error <= _ATOL_LOSSLESS, f"{name}: off by up to {error:.3g}, but it is not lossy"
        return
    bound = claims.error_bound
    assert bound is not None, (
        f"{name}: is lossy and declares no error_bound, so nothing can be checked. Declare in the class how far an"
        " average may be off, as a share of its 2-norm: claims = Claims(error_bound=...)"
    )
    num_steps = 1 if claims.keeps_residual else len(exact)  # the first average is without a residual
    errors = (received - exact).norm(dim=1) / exact.norm(dim=1)
    worst = errors[:num_steps].max().item()
    assert worst < bound, f"{name}: an average is off by {worst:.3g} in the 2-norm, its error_bound is {bound:.3g}"
    has_residual = bool(residual.abs().max() > 1e-4)
    assert has_residual == claims.keeps_residual, f"{name}: has a residual: {has_residual}, its claims: {claims}"
    if has_residual:
        lost = ((received.sum(0) + residual - exact.sum(0)).norm() / exact.norm(dim=1).sum()).item()
        assert lost < claims.untracked_error, (
            f"{name}: {lost:.3g} of the gradients is neither in the averages nor in the residual, its untracked_error"
            f" is {claims.untracked_error:.3g}"
        )


@law("all ranks receive the same bits", "parameters drift apart between ranks")
def ranks_agree(setup: Setup, name: str, compressor: Compressor) -> None:
    """Compares the averages of `NUM_STEPS` steps."""
    first, *others = values_of_all_ranks(run_steps(setup, compressor).received)
    assert all(torch.equal(first, other) for other in others), f"{name}: ranks differ"


@law(
    "bytes on the wire are those that a compressor declares",
    "predictions, and what they choose and recommend, assume faster or slower steps than there are",
)
def bytes_as_declared(setup: Setup, name: str, compressor: Compressor) -> None:
    """Where ranks send parts that differ in size, the largest part of each bucket is declared."""
    steps = run_steps(setup, compressor)
    counts, declared = values_of_all_ranks(steps.bytes_per_step), steps.declared_bytes
    is_even = setup.has_even_parts or len(set(counts)) == 1
    assert set(counts) == {declared} if is_even else 0.8 * declared <= max(counts) <= declared, (
        f"{name}: {max(counts):.0f} bytes per step, declared {declared}"
    )


@law(
    "fast arithmetic gives what its reference in plain torch gives",
    "a model trains in another way on machines where the kernels run than elsewhere",
)
def as_reference(setup: Setup, name: str, compressor: Compressor) -> None:
    """Compares averages and residuals with ``reference``, see `Compressor`; with one code in a hundred off by one."""
    if not hasattr(compressor, "reference"):
        return
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is not None
    layout, channel = Layout.of(list(setup.net().parameters()), torch.float32), Channel(dist.group.WORLD)
    state, reference_state = compressor.init(layout, setup.device), compressor.init(layout, torch.device("cpu"))
    residual, residuals = torch.zeros(layout.numel, device=setup.device), torch.zeros(world_size, layout.numel)
    pairs = []
    for step in range(NUM_STEPS):
        gradients = [random_gradients(step, other, net=setup.net) for other in range(world_size)]
        shares = torch.stack([in_bucket(layout, share) for share in gradients])
        flat = shares[rank].clone().to(setup.device)
        finish(compressor.rounds(flat, layout, state, channel, residual))
        compressor.residual(layout, state, residual)
        mean, sent = compressor.reference(shares + residuals, layout, reference_state)
        residuals += shares - sent
        pairs += [(flat.cpu(), mean), (residual.clone().cpu(), residuals[rank].clone())]
    atol = max(1e-3, 4 * compressor.claims.untracked_error)
    for step, (fast, exact) in enumerate(pairs):
        share_off = ((fast - exact).abs() > atol).float().mean().item()
        assert share_off < 0.01, f"{name}: {share_off:.1%} of the elements are off in step {step // 2}"


@law(
    "lossless compressors give the same bits as DDP, lossy ones others",
    "training with a lossless plan differs from DDP's, or reports call a plan lossy that changes nothing",
)
def as_ddp(setup: Setup, name: str, compressor: Compressor) -> None:
    """Compares with DDP's own all-reduce; beyond two ranks up to rounding, as its order of summation is another."""
    ours, ddps = run_steps(setup, compressor).received, run_steps(setup, None).received
    if compressor.claims.is_lossy:
        assert not torch.equal(ours, ddps), f"{name}: is as exact as DDP, but claims to be lossy"
    elif dist.get_world_size() == 2:  # a sum of two has one order only
        assert torch.equal(ours, ddps), f"{name}: differs from DDP"
    else:
        assert torch.allclose(ours, ddps, rtol=1e-6, atol=1e-6), f"{name}: differs from DDP"


@law(
    "a step that overflows does not poison the next ones",
    "one batch that overflows ends the training, or a loss scaler does not see that it has overflowed",
)
def overflow(setup: Setup, name: str, compressor: Compressor) -> None:
    """Infinity, NaN and numbers near the end of float32's range, on one rank only."""
    model, sync = setup.wrap(compressor)
    values, received = (1.0, torch.inf, 1.0, torch.nan, 1.0, 1e30, 2e38, 1.0, 1.0), []
    for step, value in enumerate(values):
        gradients = setup.gradients(step)
        if value != 1.0 and dist.get_rank() == dist.get_world_size() - 1:
            for gradient in gradients.values():
                gradient.view(-1)[0] = value
        received.append(setup.run_step(model, sync, gradients))
    residual = setup.end(sync)
    every = values_of_all_ranks(received)
    for step in (0, 2, 4):
        assert received[step].isfinite().all(), f"{name}: not finite in step {step}"
    for step in (1, 3):
        assert not received[step].isfinite().all(), f"{name}: hides an overflow in step {step}"
    assert not received[-1].isnan().any(), f"{name}: NaN two steps after a huge gradient"
    assert received[-1].any(), f"{name}: stopped by a huge gradient"
    assert all(value.isfinite().all() for value in residual.values()), f"{name}: its residual is not finite"
    agree = all(torch.equal(a, b) for ours in every for a, b in zip(ours[4:6], received[4:6], strict=True))
    assert agree, f"{name}: ranks differ after an overflow"


@law("tiny and zero gradients stay finite", "parameters with tiny gradients become NaN, and those with none move")
def tiny(setup: Setup, name: str, compressor: Compressor) -> None:
    """What breaks it most often is a division by a scale that is zero, or below float32's range."""
    model, sync = setup.wrap(compressor)
    received = {scale: setup.run_step(model, sync, setup.gradients(step, scale)) for step, scale in enumerate(_SCALES)}
    residual = setup.end(sync)
    assert not received[0.0].any(), f"{name}: zeros arrive as something else"
    for scale, average in received.items():
        assert average.isfinite().all(), f"{name}: not finite with gradients of {scale:g}"
    assert all(value.isfinite().all() for value in residual.values()), f"{name}: its residual is not finite"


@law(
    "small and unused parameters, and steps without gradient sync, are as with DDP",
    "biases and norms get wrong gradients, unused parameters move, or batches that only accumulate send all the same",
)
def small_and_unused(setup: Setup, name: str, compressor: Compressor) -> None:
    """Vectors, one element, a parameter without a gradient; the last backward is not synchronized."""
    x, own = torch.arange(7.0, device=setup.device), dist.get_rank() + 1
    model, sync = setup.wrap(compressor, Vectors(), find_unused_parameters=True)
    for _ in range(3):
        model.zero_grad()
        model(own * x).backward()
    num_bytes = sync.wire_bytes
    with model.no_sync():
        model(own * x).backward()
    num_bytes = sync.wire_bytes - num_bytes
    sync.detach()
    mean = (dist.get_world_size() + 1) / 2
    exact = torch.cat([(mean + own) * x, (mean + own) * x.sum()[None]])
    gradients = {key: p.grad for key, p in model.module.named_parameters() if p.grad is not None}
    received = torch.cat([gradients["bias"], gradients["one"]])
    room = 2 * (compressor.claims.error_bound or 0.0) if compressor.claims.is_lossy else 0.0
    error = (received - exact).norm().item()
    assert error <= (1e-5 + room) * exact.norm().item(), f"{name}: small gradients are off by {error:.3g}"
    unused = gradients.get("unused")
    assert unused is None or not unused.any(), f"{name}: an unused parameter has a gradient"
    assert num_bytes == 0, f"{name}: sends {num_bytes} bytes in no_sync"


@law(
    "a resumed compressor continues bit for bit",
    "a run that is resumed continues differently from one without an interruption, as a checkpoint lacks a part of the"
    " state",
)
def resume(setup: Setup, name: str, compressor: Compressor) -> None:
    """Saves after half of the steps, and makes the other half twice."""
    half = NUM_STEPS // 2
    model, sync = setup.wrap(compressor)
    for step in range(half):
        setup.run_step(model, sync, setup.gradients(step))
    saved = setup.save(sync)
    expected = [setup.run_step(model, sync, setup.gradients(step)) for step in range(half, NUM_STEPS)]
    setup.end(sync)
    model, sync = setup.wrap(compressor)
    setup.restore(model, sync, saved)
    received = [setup.run_step(model, sync, setup.gradients(step)) for step in range(half, NUM_STEPS)]
    setup.end(sync)
    for step, (ours, wanted) in enumerate(zip(received, expected, strict=True)):
        assert torch.equal(ours, wanted), f"{name}: differs in step {half + step}, resumed from {half}"


@law(
    "a compressor leaves torch's global random numbers alone",
    "dropout, augmentation and shuffling repeat themselves, or are others than without the compressor",
)
def own_randomness(setup: Setup, name: str, compressor: Any) -> None:
    """Compares the state of the global generators before and after two steps, the first of which makes a state."""
    gradients, module = [setup.gradients(step) for step in range(2)], setup.net()  # both may draw when they are made
    before = _global_generators(setup.device)
    model, sync = setup.wrap(compressor, module)
    for of_step in gradients:
        setup.run_step(model, sync, of_step)
    setup.end(sync)
    assert all(map(torch.equal, before, _global_generators(setup.device))), (
        f"{name}: seeds torch's global generator, or draws from it, which the model uses; numbers that all ranks draw"
        " alike come from a torch.Generator of its own"
    )


def _global_generators(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states
