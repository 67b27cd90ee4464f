"""Laws that hold for every compressor, on real ranks and real DDP buckets."""

import os
import shutil
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.commands.selftest.gradients import Net, random_gradients, send
from lightning_commopt.commands.selftest.laws import check_averages
from lightning_commopt.compressors import AllReduce, Compressor, Hierarchical, PowerSGD
from lightning_commopt.compressors.kernels import c_library
from lightning_commopt.sync.attach import attach_bucket_hook
from lightning_commopt.sync.hook import BucketHook
from support.cross_section import sampled
from support.every_compressor import BF16, COMPRESSORS, LOSSLESS, WITH_FEEDBACK
from support.ranks import run_ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "one_bucket": {},
    "many_buckets": {"bucket_cap_mb": 0.002},
    "static_view": {"bucket_cap_mb": 0.002, "static_graph": True, "gradient_as_bucket_view": True},
}
NUM_STEPS = 16
SETUPS = [("many_buckets", 2), ("one_bucket", 3), ("static_view", 4)]
in_all_setups = pytest.mark.parametrize(("options", "world_size"), sampled(SETUPS, by_default=[("many_buckets", 2)]))


def _ddp(compressor: Compressor | None, options: dict[str, Any]) -> tuple[DistributedDataParallel, BucketHook | None]:
    model = DistributedDataParallel(Net(), **options)
    ranks_per_node = 2 if dist.get_world_size() == 4 else 1
    if compressor is None:
        return model, None
    return model, attach_bucket_hook(model, compressor, None, ranks_per_node=ranks_per_node)


def _flat(tensors: dict[str, Tensor]) -> np.ndarray:
    return torch.cat([tensor.double().reshape(-1) for tensor in tensors.values()]).numpy()


def _run_steps(name: str, options: dict[str, Any], num_steps: int, scale: float = 1.0) -> dict[str, Any]:
    """Returns per step what was sent and received; at the end the residual and the bytes per step."""
    model, hook = _ddp(COMPRESSORS.get(name), options)
    rank, sent, received, byte_counts = dist.get_rank(), [], [], [0]
    for step in range(num_steps):
        gradients = random_gradients(step, rank, scale)
        received.append(_flat(send(model, gradients)))
        sent.append(_flat(gradients))
        byte_counts.append(hook.bytes_sent if hook else 0)
    layouts = [layout for _, layout, _ in hook._states.values()] if hook else []
    rest = hook.close() if hook else {}
    residual = {key: rest.get(key, torch.zeros(p.shape)) for key, p in model.module.named_parameters()}
    return {
        "sent": np.stack(sent),
        "received": np.stack(received),
        "residual": _flat(residual),
        "bytes": (byte_counts[-1] - byte_counts[-3]) / 2,  # the alternating ones send P and Q in turn
        "expected_bytes": [
            hook.compressor.wire_bytes(layout, dist.get_world_size()) for layout in layouts if hook is not None
        ],
    }


def _run_all(names: tuple[str, ...], options: dict[str, Any], num_steps: int, scale: float) -> dict[str, Any]:
    return {name: _run_steps(name, options, num_steps, scale) for name in names}


@cache
def _outcomes(
    options: str,
    world_size: int,
    num_steps: int = NUM_STEPS,
    scale: float = 1.0,
    names: tuple[str, ...] = (*COMPRESSORS, "ddp"),
) -> list[dict[str, Any]]:
    """Runs every compressor, and DDP's native path as "ddp", on the same ranks, once for all tests."""
    return run_ranks(_run_all, names, OPTIONS[options], num_steps, scale, world_size=world_size)


@in_all_setups
@pytest.mark.parametrize("name", COMPRESSORS)
def test_ranks_agree_and_bytes_are_as_declared(name: str, options: str, world_size: int) -> None:
    """If it fails, parameters drift apart between ranks, or a cost model built on wire_bytes is wrong."""
    first, *others = (rank[name] for rank in _outcomes(options, world_size))
    for other in others:
        np.testing.assert_array_equal(other["received"], first["received"])
    most = max(rank[name]["bytes"] for rank in _outcomes(options, world_size))  # parts of a bucket differ in size
    if "hierarchical" in name and world_size == 4:
        assert 0.8 * sum(first["expected_bytes"]) <= most <= sum(first["expected_bytes"])
    elif name != "after_steps_never":
        assert most == sum(first["expected_bytes"])
    assert len(first["expected_bytes"]) == 1 if options == "one_bucket" else len(first["expected_bytes"]) >= 3


@in_all_setups
@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_equals_ddp(name: str, options: str, world_size: int) -> None:
    """If it fails, training with a lossless plan differs from plain DDP."""
    outcome = _outcomes(options, world_size)[0]
    ours, ddp = outcome[name]["received"], outcome["ddp"]["received"]
    if world_size == 2:  # a sum of two has one order only
        np.testing.assert_array_equal(ours, ddp)
    np.testing.assert_allclose(ours, ddp, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_is_lossy_says_whether_gradients_change(name: str) -> None:
    """If it fails, reports and recommendations call a plan lossless that changes training, or the reverse."""
    outcome = _outcomes("many_buckets", 2)[0]
    is_changed = not np.array_equal(outcome[name]["received"], outcome["ddp"]["received"])
    assert COMPRESSORS[name].is_lossy is (is_changed or name == "after_steps_never")


def _received_where_one_host_has_no_compiler(names: list[str]) -> list[np.ndarray]:
    if dist.get_rank() == 1:
        os.environ["CC"] = "there-is-no-such-compiler"
    c_library.load.cache_clear()
    assert (c_library.load() is None) == (dist.get_rank() == 1)
    return [_run_steps(name, OPTIONS["many_buckets"], 6)["received"] for name in names]


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_ranks_agree_where_one_host_has_no_compiler() -> None:
    """If it fails, parameters drift apart between ranks that compute in C and in plain torch."""
    names = ["powersgd_rank_1", "powersgd_rank_2", "alternating_rank_2", "hierarchical_powersgd", "int8"]
    ours, theirs = run_ranks(_received_where_one_host_has_no_compiler, names)
    np.testing.assert_array_equal(ours, theirs)


def _check_claims(name: str, ranks: list[dict[str, Any]]) -> Tensor:
    exact = torch.from_numpy(np.mean([rank["sent"] for rank in ranks], axis=0))
    residual = torch.from_numpy(np.mean([rank["residual"] for rank in ranks], axis=0))
    check_averages(name, COMPRESSORS[name], torch.from_numpy(ranks[0]["received"]), exact, residual)
    return residual


@in_all_setups
@pytest.mark.parametrize("name", COMPRESSORS)
def test_errors_are_as_declared(name: str, options: str, world_size: int) -> None:
    """If it fails, an average is off by more than its compressor claims, or error feedback drops gradients.

    The buckets change their layout after the first steps, so that it covers what is carried over as well.
    """
    residual = _check_claims(name, [rank[name] for rank in _outcomes(options, world_size)])
    assert COMPRESSORS[name].keeps_residual == (name in WITH_FEEDBACK)
    assert (residual.abs().max() > 1e-4) == (name in WITH_FEEDBACK)  # else it would show nothing


def _bytes_of_even_parts(inner: Compressor) -> tuple[float, float]:
    byte_counts = []
    for compressor in (inner, Hierarchical(inner=inner)):
        model = DistributedDataParallel(nn.Linear(64, 64, bias=False))
        hook = attach_bucket_hook(model, compressor, None, ranks_per_node=2)
        model(torch.randn(4, 64)).sum().backward()
        byte_counts.append(hook.bytes_sent)
        hook.close()
    return byte_counts[0], byte_counts[1]


@pytest.mark.parametrize("inner", [AllReduce(), BF16], ids=["all_reduce", "bf16"])
def test_traffic_across_nodes_falls_by_the_ranks_per_node(inner: Compressor) -> None:
    """If it fails, the hierarchy sends more to other nodes than it has to."""
    for flat, across_nodes in run_ranks(_bytes_of_even_parts, inner, world_size=4):
        assert across_nodes == flat / 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_nothing_is_lost_over_many_steps(name: str) -> None:
    """If it fails, what error feedback holds back drifts away from what was not sent."""
    _check_claims(name, [rank[name] for rank in _outcomes("many_buckets", 2, 50, names=tuple(WITH_FEEDBACK))])


class Vectors(nn.Module):
    """Nothing that is worth compressing, and a parameter that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.arange(7.0))
        self.one = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(5, 300))

    def forward(self, x: Tensor) -> Tensor:
        """Returns a loss."""
        return (self.bias * x).sum() + self.one.sum() * x.sum()


def _small_and_unused() -> dict[str, dict[str, Any]]:
    outcomes = {}
    x = torch.arange(7.0) * (dist.get_rank() + 1)
    for name, compressor in COMPRESSORS.items():
        model = DistributedDataParallel(Vectors(), find_unused_parameters=True)
        hook = attach_bucket_hook(model, compressor, None)
        for _ in range(3):
            model.zero_grad()
            model(x).backward()
        sent = hook.bytes_sent
        with model.no_sync():
            model(x).backward()
        gradients = {key: p.grad.numpy() for key, p in model.module.named_parameters() if p.grad is not None}
        outcomes[name] = {"gradients": gradients, "sent_in_no_sync": hook.bytes_sent - sent}
        hook.close()
    return outcomes


@cache
def _small_outcomes() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(_small_and_unused)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_small_and_unused_parameters(name: str) -> None:
    """If it fails, vectors, one-element tensors or unused parameters break a compressor, or no_sync sends something."""
    x = torch.arange(7.0)
    for rank, outcome in enumerate(ranks[name] for ranks in _small_outcomes()):
        mean, own = 1.5, rank + 1  # the last backward was not synchronized
        gradients, atol = outcome["gradients"], 4 if name.startswith("int4") else 0.1
        np.testing.assert_allclose(gradients["bias"], (mean + own) * x, rtol=0.02, atol=atol)
        np.testing.assert_allclose(gradients["one"], (mean + own) * x.sum()[None], rtol=0.02, atol=atol)
        assert not gradients.get("unused", np.zeros(1)).any()
        assert outcome["sent_in_no_sync"] == 0


@pytest.mark.parametrize(("name", "tolerance"), [("bf16", 2**-7), ("fp16", 2**-10)])
def test_cast_error(name: str, tolerance: float) -> None:
    """If it fails, the cast rounds more than its dtype does."""
    ranks = [rank[name] for rank in _outcomes("many_buckets", 2)]
    mean = np.mean([rank["sent"] for rank in ranks], axis=0)
    magnitude = np.max([np.abs(rank["sent"]) for rank in ranks], axis=0)
    assert (np.abs(ranks[0]["received"] - mean) <= tolerance * magnitude + 1e-7).all()
    assert not np.array_equal(ranks[0]["received"], mean.astype(np.float32))


@pytest.mark.parametrize("scale", sampled([0.0, 1e-20, 1e4], by_default=[1e-20]))
@pytest.mark.parametrize("name", COMPRESSORS)
def test_extreme_gradients_stay_finite(name: str, scale: float) -> None:
    """If it fails, zero, tiny or huge gradients turn into NaN."""
    for rank in (rank[name] for rank in _outcomes("many_buckets", 2, num_steps=3, scale=scale)):
        assert np.isfinite(rank["received"]).all()
        assert np.isfinite(rank["residual"]).all()
        assert scale or not rank["received"].any()


def _exact_recovery(matrix_rank: int) -> tuple[np.ndarray, np.ndarray]:
    model, _ = _ddp(PowerSGD(matrix_rank=matrix_rank), {})
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
    return _flat(received), _flat(means)


@pytest.mark.parametrize("matrix_rank", sampled([1, 2, 4], by_default=[2]))
def test_low_rank_is_recovered_exactly(matrix_rank: int) -> None:
    """If it fails, PowerSGD loses what its rank could carry, also where the gradient's rank is below it."""
    for received, mean in run_ranks(_exact_recovery, matrix_rank):
        np.testing.assert_allclose(received, mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", sampled([1e30, 2e38], by_default=[]))
@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_huge_step_is_got_over(name: str, bad: float) -> None:
    """If it fails, one gradient near the end of float32's range stops a compressor for ever."""
    first, second = (rank[name] for rank in _bad_outcomes(bad))
    np.testing.assert_array_equal(first["received"], second["received"])
    assert not np.isnan(first["received"][-1]).any()
    assert first["received"][-1].any()


def _one_bad_step(bad: float) -> dict[str, Any]:
    return {name: _one_bad_step_of(name, bad) for name in COMPRESSORS}


@cache
def _bad_outcomes(bad: float) -> list[dict[str, Any]]:
    return run_ranks(_one_bad_step, bad)


def _one_bad_step_of(name: str, bad: float) -> dict[str, Any]:
    model, hook = _ddp(COMPRESSORS[name], {"bucket_cap_mb": 0.002})
    assert hook is not None
    outcome = []
    for step in range(6):
        gradients = random_gradients(step, dist.get_rank())
        if step == 3 and dist.get_rank() == 1:
            for value in gradients.values():
                value.view(-1)[0] = bad
        outcome.append(_flat(send(model, gradients)))
    return {"received": outcome, "residual": {key: value.float().numpy() for key, value in hook.close().items()}}


@pytest.mark.parametrize("bad", sampled([torch.inf, torch.nan], by_default=[torch.inf]))
@pytest.mark.parametrize("name", COMPRESSORS)
def test_non_finite_does_not_outlive_its_step(name: str, bad: float) -> None:
    """If it fails, one overflow under a gradient scaler poisons all later steps, or the ranks disagree on it."""
    first, second = (rank[name] for rank in _bad_outcomes(bad))
    assert not np.isfinite(first["received"][3]).all()
    for step in (0, 1, 2, 4, 5):
        assert np.isfinite(first["received"][step]).all()
    np.testing.assert_array_equal(first["received"], second["received"])
    for rank in (first, second):
        assert all(np.isfinite(value).all() for value in rank["residual"].values())
