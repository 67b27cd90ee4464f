"""Kernels are compiled when a hook is attached, and all ranks do without Triton where one of them has to."""

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from stream_timeline import buckets_of, gpt_1_3b, vit_l_32
from test_side_streams import CASES, steps

from lightning_commopt.compressors import (
    AlternatingPowerSGD,
    Cast,
    Compressor,
    ErrorFeedback,
    Int4,
    Int8,
    PowerSGD,
)
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.compressors.kernels import dispatch
from lightning_commopt.sync import warm_up
from support.cross_section import sampled
from support.ddp_steps import Training
from support.every_compressor import BF16, COMPRESSORS
from support.fake_cuda import DEVICE, cuda_on, needs_fake_copies
from support.machine import Machine
from support.ranks import run_ranks


def triton_launches(machine: Machine) -> set[str]:
    return {launch.name for launch in machine.launches if launch.name.startswith("_")}


@needs_fake_copies
@pytest.mark.parametrize("name", sampled(CASES, by_default=["alternating_rank_2"]))
def test_training_needs_no_kernel_that_is_not_compiled_when_it_begins(name: str) -> None:
    """If it fails, the first backward of every rank compiles for seconds, and others wait for it."""
    in_training, compiled = Machine(), Machine()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with cuda_on(in_training):
            training = Training(in_training, CASES[name])
            steps(training)
            channel, compressor = training.channel, training.hook.compressor
        with cuda_on(compiled):
            warm_up.run_on_samples(compressor, channel, [torch.float32], DEVICE)
    assert triton_launches(in_training) - triton_launches(compiled) == set()


def resnet_50() -> tuple[tuple[int, ...], ...]:
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(num_blocks):
            sizes = [(width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            sizes += [(4 * width, channels, 1, 1)] if block == 0 else []
            shapes += [shape for size in sizes for shape in (size, (size[0],), (size[0],))]
            channels = 4 * width
    return (*shapes, (1000, channels), (1000,))


MODELS = {"ViT-L/32": vit_l_32().shapes, "GPT 1.3 B": gpt_1_3b().shapes, "ResNet-50": resnet_50()}
MODEL_CASES: dict[str, Compressor] = {
    "int8": Int8(),
    "int4": Int4(),
    "int4_feedback": Int4(error_feedback=True, residual_dtype="bfloat16"),
    "bf16_feedback": ErrorFeedback(inner=BF16),
    "bf16_float32_sum": Cast(dtype=torch.bfloat16, accumulate="float32"),
    "powersgd": PowerSGD(matrix_rank=4),
    "alternating": AlternatingPowerSGD(matrix_rank=4),
}


FITS = [*((name, "GPT 1.3 B", 2) for name in MODEL_CASES), *(("int8", model, 8) for model in MODELS)]


@needs_fake_copies
@pytest.mark.parametrize(("name", "model", "world_size"), sampled(FITS, by_default=[("int8", "ResNet-50", 8)]))
def test_buckets_of_models_need_no_other_kernel(name: str, model: str, world_size: int) -> None:
    """If it fails, sizes of real models are compiled for in the first backward: those that 16 divides, or not."""
    in_training, compiled = Machine(), Machine()
    shapes, compressor = MODELS[model], MODEL_CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with cuda_on(in_training, world_size):
            training = Training(in_training, compressor, shapes=shapes, buckets=buckets_of(shapes))
            training.run(2)
            channel, compressor = training.channel, training.hook.compressor
        with cuda_on(compiled, world_size):
            warm_up.run_on_samples(compressor, channel, [torch.float32], DEVICE)
    assert triton_launches(in_training) - triton_launches(compiled) == set()


def _compile(fails: str) -> tuple[bool, list[str]]:
    """Compiles on CPU, where Triton is said to be there; it fails on rank 1, or an own compressor fails everywhere."""

    def fail(*args: Any) -> None:
        if fails == "compressor" or (dist.get_rank() == 1 and dispatch.has_triton()):
            raise RuntimeError("no C compiler\nand a long trace")

    group = dist.group.WORLD
    assert group is not None
    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch.object(dispatch, "_finds_triton", return_value=True),
        mock.patch.object(warm_up, "run_on_samples", fail),
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            warm_up.compile_kernels(BF16, Channel(group), [torch.float32], torch.device("cpu"), group)
        return dispatch.has_triton(), [str(warning.message) for warning in caught]


def test_all_ranks_do_without_triton_where_one_of_them_cannot_compile() -> None:
    """If it fails, ranks compute the average in different bits, and models drift apart without any sign."""
    (first, said), (second, also_said) = run_ranks(_compile, "triton")
    assert not first
    assert not second
    for messages, reason in ((said, "on another rank"), (also_said, "RuntimeError: no C compiler")):
        (message,) = messages
        assert f"Triton cannot compile the kernels of comm_hook ({reason})" in message


def test_a_compressor_that_fails_by_itself_does_not_count_against_triton() -> None:
    assert run_ranks(_compile, "compressor") == [(True, [])] * 2


def test_samples_run_without_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, what is run before training sends something, or needs a device."""
    monkeypatch.setattr(warm_up, "_SHAPES", (((40, 33), (7,)),))
    alone: Any = mock.Mock(size=2, rank=1, within=None, across=None)
    channel: Any = mock.Mock(size=4, rank=1, within=alone, across=alone)
    for name in ("powersgd_rank_2", "hierarchical_int8"):
        warm_up.run_on_samples(COMPRESSORS[name], channel, [torch.float32, torch.int64], torch.device("cpu"))
    assert channel.method_calls == alone.method_calls == []
