"""Kernels are compiled when a hook is attached, and all ranks do without Triton where one of them has to."""

import itertools
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from stream_timeline import buckets_of, gpt_1_3b, vit_l_32
from test_side_streams import CASES, steps
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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
from lightning_commopt.compressors.kernels import blockwise, dispatch
from lightning_commopt.compressors.sharded import ShardedBf16, ShardedCompressor, ShardedInt4, ShardedInt8
from lightning_commopt.sync import warm_up
from lightning_commopt.sync.fsdp2 import gradients as sharded
from lightning_commopt.sync.fsdp2 import parameters as sharded_gather
from lightning_commopt.sync.fsdp2.gradients import ShardedSync
from lightning_commopt.sync.fsdp2.parameters import GatheredParameters, gather, round_samples
from lightning_commopt.sync.fsdp2.unit import _reduce_scatter
from support.collectives import takes_collectives
from support.cross_section import sampled
from support.ddp_steps import Training
from support.every_compressor import BF16, COMPRESSORS
from support.fake_cuda import DEVICE, cuda_on, needs_fake_copies
from support.machine import Machine
from support.ranks import run_ranks


def triton_launches(machine: Machine) -> set[str]:
    return {launch.name for launch in machine.launches if launch.name.startswith("_")}


@pytest.mark.exhaustive
@needs_fake_copies
@pytest.mark.parametrize("name", CASES)
def test_training_needs_no_kernel_that_is_not_compiled_when_it_begins(name: str) -> None:
    """If it fails, the first backward of every rank compiles for seconds, and others wait for it."""
    in_training, compiled = Machine(), Machine()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with cuda_on(in_training):
            training = Training(in_training, CASES[name])
            steps(training)
        with cuda_on(compiled):
            training.compile_samples()
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
        with cuda_on(compiled, world_size):
            training.compile_samples()
    assert triton_launches(in_training) - triton_launches(compiled) == set()


SHARDED_CASES: dict[str, ShardedCompressor] = {
    "bf16": ShardedBf16(),
    "int8": ShardedInt8(),
    "int8_feedback": ShardedInt8(error_feedback=True, block_size=16),
    "int4_feedback": ShardedInt4(error_feedback=True),
}
_GROUP: Any = "ranks"
_SHARD_SIZES = (1, 1000, 3 * 16 * 256, 5120 * 13)


@needs_fake_copies
@pytest.mark.parametrize(
    ("name", "world_size", "dtype"),
    sampled(
        itertools.product(SHARDED_CASES, (2, 8), (torch.bfloat16, torch.float32)),
        by_default=[
            *((name, 2, torch.bfloat16) for name in ("bf16", "int8_feedback")),
            *((name, 8, torch.bfloat16) for name in ("int8", "int4_feedback")),
        ],
    ),
)
def test_units_of_fsdp2_need_no_other_kernel(name: str, world_size: int, dtype: torch.dtype) -> None:
    """If it fails, the first reduce-scatters of every rank compile for seconds."""
    in_training, compiled = Machine(), Machine()
    compressor = SHARDED_CASES[name]
    with cuda_on(in_training, world_size):
        for numel in _SHARD_SIZES:
            rows = torch.ones(world_size, numel + 8, dtype=dtype, device=DEVICE)
            state = compressor.init(numel, world_size, DEVICE)
            for _ in range(2):
                _reduce_scatter(rows, rows[0].clone(), [(numel, True), (8, False)], compressor, state, Channel(_GROUP))
    with cuda_on(compiled, world_size):
        warm_up.run_on_shards(compressor, Channel(_GROUP), [dtype], DEVICE)
    assert triton_launches(in_training)
    assert triton_launches(in_training) - triton_launches(compiled) == set()


@needs_fake_copies
def test_parameters_of_fsdp2_need_no_other_kernel() -> None:
    """If it fails, the first all-gathers of every rank compile for seconds."""
    in_training, compiled = Machine(), Machine()
    for dtype in (torch.bfloat16, torch.float32):
        with cuda_on(in_training):
            for numel in _SHARD_SIZES:
                mine = torch.ones(numel, dtype=dtype, device=DEVICE)
                rows = mine.new_empty(2, numel)
                gather([mine, mine[:1]], [rows, rows[:, :1]], [(len(mine), True), (1, False)], Channel(_GROUP))
        with cuda_on(compiled):
            round_samples([dtype], DEVICE)
    assert triton_launches(in_training)
    assert triton_launches(in_training) - triton_launches(compiled) == set()


_PREPARED: dict[str, Callable[[], ShardedSync | GatheredParameters]] = {
    "comm_hook": lambda: ShardedSync(ShardedInt8()),
    "param_hook": GatheredParameters,
}


def _attach(option: str) -> tuple[bool, list[str]]:
    """Attaches on CPU as if it were CUDA, where Triton works on rank 0 only."""
    prepare, compile_all, encode = warm_up.prepare_kernels, warm_up.compile_kernels, blockwise.encode

    def fail(*args: Any) -> None:
        if dist.get_rank() == 1 and dispatch.has_triton():
            raise RuntimeError("no C compiler")
        encode(*args)

    def prepare_for_cuda(run: Callable[[], None], device: torch.device, **options: Any) -> None:
        prepare(run, DEVICE, **options)

    model = torch.nn.Linear(64, 64)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch.object(dispatch, "_finds_triton", return_value=True),
        mock.patch.object(blockwise, "encode", fail),
        mock.patch.object(sharded, "prepare_kernels", prepare_for_cuda),
        mock.patch.object(sharded_gather, "prepare_kernels", prepare_for_cuda),
        mock.patch.object(
            warm_up, "compile_kernels", lambda run, device, **options: compile_all(run, torch.device("cpu"), **options)
        ),
    ):
        warnings.simplefilter("always")
        _PREPARED[option]().attach(model)
        printed = [str(warning.message) for warning in caught if "Triton" in str(warning.message)]
        return dispatch.has_triton(), printed


@takes_collectives
@pytest.mark.parametrize("option", _PREPARED)
def test_fsdp2_compiles_when_it_is_attached(option: str) -> None:
    """If it fails, the first steps compile, or ranks of FSDP2 go on with Triton where one of them cannot."""
    (first, printed), (second, also_printed) = run_ranks(_attach, option)
    assert not first
    assert not second
    for messages, reason in ((printed, "on another rank"), (also_printed, "RuntimeError: no C compiler")):
        (message,) = messages
        assert f"Triton cannot compile the kernels of {option} ({reason})" in message


def _compile(fails: str) -> tuple[bool, list[str]]:
    """Compiles on CPU, where Triton is said to be there; it fails on rank 1, or an own compressor fails everywhere."""

    def fail() -> None:
        if fails == "compressor" or (dist.get_rank() == 1 and dispatch.has_triton()):
            raise RuntimeError("no C compiler\nand a long trace")

    group = dist.group.WORLD
    assert group is not None
    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch.object(dispatch, "_finds_triton", return_value=True),
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            warm_up.compile_kernels(fail, torch.device("cpu"), group)
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
