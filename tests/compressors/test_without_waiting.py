"""Compressors in one process, with all ranks having the same gradients."""

import pytest
import torch
from torch import Tensor

from lightning_commopt.compressors import (
    AllReduce,
    AlternatingPowerSGD,
    Cast,
    Compressor,
    ErrorFeedback,
    Int8,
    PowerSGD,
)
from lightning_commopt.compressors.base import Layout, finish
from lightning_commopt.compressors.channel import AloneChannel

BF16 = Cast(dtype=torch.bfloat16)
COMPRESSORS: dict[str, Compressor] = {
    "all_reduce": AllReduce(),
    "all_reduce_feedback": ErrorFeedback(inner=AllReduce()),
    "bf16": BF16,
    "bf16_feedback": ErrorFeedback(inner=BF16),
    "bf16_in_float32": ErrorFeedback(inner=Cast(dtype=torch.bfloat16, accumulate="float32")),
    "int8": Int8(),
    "powersgd_rank_1": PowerSGD(),
    "powersgd_rank_4": PowerSGD(matrix_rank=4),
    "powersgd_bf16_residual": PowerSGD(matrix_rank=4, residual_dtype="bfloat16"),
    "alternating_rank_4": AlternatingPowerSGD(matrix_rank=4),
}


def run_steps(compressor: Compressor, device: str, num_matrices: int = 3) -> list[Tensor]:
    """Returns what five steps gave, the fourth of them not finite. No step but the first two may wait for a device."""
    parameters = [x for _ in range(num_matrices) for x in (torch.empty(96, 64), torch.empty(33))]
    layout = Layout.of(parameters, torch.float32)
    state = compressor.init(layout, torch.device(device))
    channel = AloneChannel(2)
    generator = torch.Generator().manual_seed(0)
    flats = [torch.randn(layout.numel, generator=generator) for _ in range(5)]
    flats[3][5] = float("inf")
    flats = [flat.to(device) for flat in flats]
    try:
        for step, flat in enumerate(flats):
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
            finish(compressor.rounds(flat, layout, state, channel))
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return [flat.cpu() for flat in flats]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", COMPRESSORS)
def test_no_step_waits_for_the_device(name: str) -> None:
    """If it fails, the host waits in the middle of backward: nothing is computed while gradients travel."""
    on_cuda, on_cpu = run_steps(COMPRESSORS[name], "cuda"), run_steps(COMPRESSORS[name], "cpu")
    for ours, theirs in zip(on_cuda, on_cpu, strict=True):
        assert ours.isfinite().all() == theirs.isfinite().all()
        if theirs.isfinite().all():
            torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


def num_launches(compressor: Compressor, num_matrices: int) -> int:
    run_steps(compressor, "cuda", num_matrices)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run_steps(compressor, "cuda", num_matrices)
    return sum(event.device_type.name == "CUDA" for event in profile.events())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["powersgd_rank_4", "powersgd_bf16_residual", "alternating_rank_4"])
def test_launches_do_not_grow_with_the_matrices(name: str) -> None:
    """If it fails, a model of many small layers spends its time on launches."""
    assert num_launches(COMPRESSORS[name], 12) <= num_launches(COMPRESSORS[name], 3) + 10
