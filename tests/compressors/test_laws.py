"""The laws for many compressors and setups, and what holds for some of them only."""

import os
import shutil
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compressors import AfterSteps, Compressor, Hierarchical, Int8, Layout, PowerSGD
from lightning_commopt.compressors.base import finish
from lightning_commopt.compressors.channel import AloneChannel
from lightning_commopt.compressors.kernels import c_library
from lightning_commopt.compressors.wrappers import Wrapper
from lightning_commopt.sync.ddp.attach import attach_bucket_hook
from lightning_commopt.testing.laws import LAWS, as_ddp, as_reference, small_and_unused
from lightning_commopt.testing.places import CPU
from lightning_commopt.testing.steps import Net, Setup, flatten, random_gradients, run_steps, send
from support.c_kernels import must_run_in_c
from support.cross_section import sampled
from support.every_compressor import BF16, BF16_IN_FLOAT32, COMPRESSORS, FURTHER, REGISTERED
from support.warm_ranks import run_ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "one_bucket": {},
    "many_buckets": {"bucket_cap_mb": 0.002},
    "static_view": {"bucket_cap_mb": 0.002, "static_graph": True, "gradient_as_bucket_view": True},
}
BY_DEFAULT = ("alternating_powersgd", "by_size", "int4", "int8")
ON_NODES = (
    *("hierarchical_lossless", "hierarchical_int8", "hierarchical_powersgd"),
    *("feedback_around_hierarchical", "bf16"),
)
SETUPS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "two ranks": ("many_buckets", 2, BY_DEFAULT),
    "the others": ("many_buckets", 2, tuple(name for name in REGISTERED if name not in BY_DEFAULT)),
    "other settings": ("many_buckets", 2, FURTHER),
    "three ranks": ("one_bucket", 3, ("bf16_in_float32", "int4_feedback", "int8_small_blocks", "powersgd_rank_2")),
    "two nodes": ("static_view", 4, ON_NODES),
}
"""Options of DDP, number of ranks, and compressors that the same ranks try."""


def _setup(options: str) -> Setup:
    return Setup(place=CPU, options=OPTIONS[options], ranks_per_node=2 if dist.get_world_size() == 4 else 1)


def _message(setup: Setup, law: str, name: str) -> str:
    try:
        LAWS[law](setup, name, COMPRESSORS[name])
    except AssertionError as error:
        return str(error)
    return ""


def _messages(options: str, law: str, names: tuple[str, ...]) -> dict[str, str]:
    setup = _setup(options)
    messages = {name: _message(setup, law, name) for name in names}
    return {name: message for name, message in messages.items() if message}


@pytest.mark.parametrize("setup", sampled(SETUPS, by_default=["two ranks"]))
@pytest.mark.parametrize("law", LAWS)
def test_law(law: str, setup: str) -> None:
    """If it fails, the message names what is broken. Most setups change their buckets after the first step."""
    options, world_size, names = SETUPS[setup]
    if options == "static_view" and law == small_and_unused.name:
        pytest.skip("parameters are unused in turn, which a static graph excludes")
    assert run_ranks(_messages, options, law, names, world_size=world_size) == [{}] * world_size


def test_fast_algorithms_give_what_their_reference_gives() -> None:
    """If it fails, machines with kernels train in another way, or a law passes because there is no reference."""
    names = ("bf16", "bf16_in_float32", "fp16", "block_int8", "block_int4", "low_rank", "alternating_low_rank")
    assert all(hasattr(COMPRESSORS[name], "reference") for name in names)
    assert run_ranks(_messages, "many_buckets", as_reference.name, names) == [{}] * 2
    algorithms = [x for x in COMPRESSORS.values() if x.claims.has_c_kernels and x.claims.is_part]
    assert all(hasattr(x, "reference") for x in algorithms if not isinstance(x, Wrapper))


@pytest.mark.parametrize(
    "name", [name for name, x in COMPRESSORS.items() if x.claims.keeps_residual and "hierarchical" not in name]
)
def test_a_state_that_keeps_a_residual_takes_over_a_given_one(name: str) -> None:
    """If it fails, what earlier buckets have left is sent twice."""
    compressor, layout = COMPRESSORS[name], Layout.of([torch.empty(40, 33), torch.empty(7)], torch.float32)
    channel = AloneChannel(2)
    residual = torch.ones(layout.numel)
    state = compressor.init(layout, residual.device)
    finish(compressor.rounds(torch.randn(layout.numel), layout, state, channel, residual))
    assert not residual.any()


def _start_late() -> None:
    late = AfterSteps(inner=BF16, start_step=1000)
    setup = _setup("many_buckets")
    ours, exact = (run_steps(setup, compressor) for compressor in (late, None))
    assert torch.equal(ours.received, exact.received)
    assert ours.bytes_per_step == exact.bytes_per_step


def test_nothing_is_lossy_before_a_late_start() -> None:
    """If it fails, the first steps are compressed in spite of start_step."""
    run_ranks(_start_late)


def _lies_about_loss() -> str:
    try:
        as_ddp(_setup("one_bucket"), "late", AfterSteps(inner=BF16, start_step=1000))
    except AssertionError as error:
        return str(error)
    return ""


def test_a_lossless_compressor_that_claims_loss_is_found() -> None:
    """If it fails, a report calls a plan lossy that changes nothing."""
    assert run_ranks(_lies_about_loss) == ["late: is as exact as DDP, but claims to be lossy"] * 2


def _received_where_one_host_has_no_compiler(names: list[str]) -> list[bytes]:
    if dist.get_rank() == 1:
        os.environ["CC"] = "there-is-no-such-compiler"
    c_library.load.cache_clear()
    assert (c_library.load() is None) == (dist.get_rank() == 1)
    received = []
    for name in names:
        with must_run_in_c() if dist.get_rank() == 0 else nullcontext():
            received.append(run_steps(_setup("many_buckets"), COMPRESSORS[name]).received.numpy().tobytes())
    return received


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_ranks_agree_where_one_host_has_no_compiler() -> None:
    """If it fails, parameters drift apart between ranks that compute in C and in plain torch."""
    names = ["powersgd_rank_2", "alternating_rank_2", "int8"]
    ours, theirs = run_ranks(_received_where_one_host_has_no_compiler, names)
    assert ours == theirs


def _bytes_of_even_parts(inner: Compressor) -> tuple[float, float]:
    byte_counts = []
    for compressor in (inner, Hierarchical(inner=inner)):
        model = DistributedDataParallel(nn.Linear(64, 64, bias=False))
        hook = attach_bucket_hook(model, compressor, None, ranks_per_node=2)
        model(torch.randn(4, 64)).sum().backward()
        byte_counts.append(hook.bytes_sent)
        hook.close()
    return byte_counts[0], byte_counts[1]


def test_traffic_across_nodes_falls_by_the_ranks_per_node() -> None:
    """If it fails, the hierarchy sends more to other nodes than it has to."""
    for flat, across_nodes in run_ranks(_bytes_of_even_parts, BF16, world_size=4):
        assert across_nodes == flat / 2


def test_nothing_crosses_nodes_where_there_is_one_at_most() -> None:
    """If it fails, a prediction for fewer ranks than a node had ends in a division by zero."""
    layout = Layout.of([torch.empty(64, 64)], torch.float32)
    for inner in (BF16_IN_FLOAT32, Int8()):
        compressor = Hierarchical(inner=inner, ranks_per_node=4)
        assert [compressor.wire_bytes(layout, world_size) for world_size in (2, 4)] == [0, 0]


def _exact_recovery(matrix_rank: int) -> tuple[Tensor, Tensor]:
    model, _ = _setup("one_bucket").wrap(PowerSGD(matrix_rank=matrix_rank))
    generator = torch.Generator().manual_seed(dist.get_rank())
    left = {name: torch.randn(p.shape[0], 1) for name, p in Net().named_parameters() if p.dim() > 1}
    for value in left.values():
        dist.broadcast(value, 0)
    gradients = random_gradients(0, dist.get_rank())
    for name, column in left.items():
        row = torch.randn(1, gradients[name][0].numel(), generator=generator)
        gradients[name] = (column @ row).view(gradients[name].shape)
    received = send(model, gradients)
    means = {name: value.clone() for name, value in gradients.items()}
    for value in means.values():
        dist.all_reduce(value)
        value.div_(dist.get_world_size())
    return flatten(received), flatten(means)


@pytest.mark.parametrize("matrix_rank", sampled([1, 4], by_default=[4]))
def test_low_rank_is_recovered_exactly(matrix_rank: int) -> None:
    """If it fails, PowerSGD loses what its rank could carry, also where the gradient's rank is below it."""
    for received, mean in run_ranks(_exact_recovery, matrix_rank):
        torch.testing.assert_close(received, mean, rtol=1e-4, atol=1e-5)
