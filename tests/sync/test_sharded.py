"""Compressed reduce-scatters of FSDP2: the laws, and what does not fit."""

import warnings
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from lightning_commopt.commands.selftest.sharded_laws import example_shards
from lightning_commopt.compat.fsdp import comm_object, forces_sum
from lightning_commopt.compressors.configs import compressor_to_config, sharded_from_config
from lightning_commopt.compressors.sharded import ShardedBf16, ShardedInt4, ShardedInt8
from lightning_commopt.compressors.sharded_hierarchical import ShardedHierarchical
from lightning_commopt.compressors.shards import first_seed
from lightning_commopt.plan import OptionError
from lightning_commopt.sync.fsdp2.gradients import ShardedSync
from lightning_commopt.sync.fsdp2.unit import UnitReduceScatter
from lightning_commopt.sync.gather import values_of_all_ranks
from lightning_commopt.testing.sharded_laws import (
    SHARDED_LAWS,
    ShardedSetup,
    new_model,
    run_step,
)
from lightning_commopt.testing.steps import flatten, run_steps
from support.collectives import takes_collectives
from support.cross_section import sampled
from support.warm_ranks import run_ranks

pytestmark = takes_collectives

SETUPS: dict[str, tuple[int, ShardedSetup, slice]] = {
    "2 ranks": (2, ShardedSetup(), slice(3, None, 5)),
    "the others": (2, ShardedSetup(), slice(None)),
    "3 ranks": (3, ShardedSetup(options={"reshard_after_forward": False}), slice(3, None, 2)),
    "2 replicas": (4, ShardedSetup(num_replicas=2), slice(2, None, 3)),
    "2 nodes": (4, ShardedSetup(), slice(-1, None)),
}
"""Number of ranks, how they shard, and which of the examples they try."""


def _messages(setup: ShardedSetup, compressors: slice) -> dict[str, str]:
    messages, examples = {}, [*example_shards(setup.num_replicas).items()]
    for name, law in SHARDED_LAWS.items():
        # All of them declare their bytes by a formula of their own.
        for example, compressor in examples if name == "bytes_as_declared" else examples[compressors]:
            try:
                law(setup, example, compressor)
            except AssertionError as error:
                messages[f"{name}: {example}"] = str(error)
    return messages


@pytest.mark.parametrize("setup", sampled(SETUPS, by_default=["2 ranks"]))
def test_laws(setup: str) -> None:
    """If it fails, gradients are wrong by more than a compressor claims, or more bytes travel."""
    world_size, sharded, compressors = SETUPS[setup]
    assert run_ranks(_messages, sharded, compressors, world_size=world_size) == [{}] * world_size


class _InRows(nn.Module):
    """One matrix that is sharded by columns, and one whose norm shares it."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(5, 8))
        self.other = nn.Parameter(torch.zeros(6, 4))

    def forward(self, matrix: Tensor, other: Tensor | None) -> Tensor:
        loss = (self.matrix * matrix).sum()
        return loss if other is None else loss + (self.other * other).sum()


def _by_columns() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = _InRows()
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(1))
    sync = ShardedSync(ShardedInt8(error_feedback=True))
    sync.attach(model)
    matrix, other = torch.randn(2, 5, 8)[dist.get_rank()], torch.randn(6, 4)
    model(matrix, other).backward()
    got = model.matrix.grad.full_tensor()  # type: ignore[union-attr]
    residual = torch.stack(values_of_all_ranks(sync.residuals()["matrix"])).mean(0)
    exact = torch.stack(values_of_all_ranks(matrix)).mean(0)
    return got, residual, exact, got - exact


def test_shards_of_columns() -> None:
    """If it fails, residuals belong to other elements where parameters are not cut by rows."""
    for got, residual, exact, error in run_ranks(_by_columns):
        assert error.abs().max() > 0
        torch.testing.assert_close(got + residual, exact, rtol=0, atol=1e-4)


def _partly_used() -> tuple[bool, bool, list[str]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = _InRows()
    fully_shard(model, mesh=mesh)
    ShardedSync(ShardedInt8()).attach(model)
    matrix, other = torch.randn(5, 8), torch.randn(6, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(matrix, None).backward()
    exact = torch.stack(values_of_all_ranks(matrix)).mean(0)
    is_exact = torch.allclose(model.matrix.grad.full_tensor(), exact, atol=1e-6)  # type: ignore[union-attr]
    model.zero_grad()
    model(matrix, other).backward()
    is_again = torch.equal(model.matrix.grad.full_tensor(), exact)  # type: ignore[union-attr]
    return is_exact, is_again, [str(each.message) for each in caught if "comm_hook" in str(each.message)]


def test_a_backward_that_reaches_some_parameters_only() -> None:
    """If it fails, columns of one parameter are taken for those of another, or it stays uncompressed in silence."""
    first, second = run_ranks(_partly_used)
    assert first[:2] == second[:2] == (True, False)
    assert len(first[2]) == 1


def _thawed() -> tuple[float, float]:
    model, sync = ShardedSetup().wrap(ShardedInt8(error_feedback=True))
    received = torch.zeros(())
    sent = []
    for step in range(6):
        frozen = step in (2, 3)
        for name, parameter in model.named_parameters():
            if name == "parts.0.p2":
                parameter.requires_grad_(not frozen)
        gradients = ShardedSetup().gradients(step)
        averages = run_step(model, gradients)
        if not frozen:
            sent.append(gradients["parts.0.p2"])
            received = received + averages["parts.0.p2"]
    exact = torch.stack(values_of_all_ranks(torch.stack(sent).sum(0))).mean(0)
    residual = torch.stack(values_of_all_ranks(sync.residuals()["parts.0.p2"])).mean(0)
    return float((received - exact).norm() / exact.norm()), float((received + residual - exact).norm() / exact.norm())


def test_parameters_that_are_frozen_for_a_while() -> None:
    """If it fails, what was not sent of a frozen parameter is lost, or columns are taken for others."""
    for without, with_residual in run_ranks(_thawed):
        assert with_residual < 1e-3 < without


def _seeds() -> tuple[list[int], int]:
    """Returns the next seed of each unit after five steps, the last without a parameter; and the steps once resumed."""
    model, sync = ShardedSetup().wrap(ShardedInt8(stochastic_rounding=True))
    for step in range(5):
        model.get_parameter("parts.0.p2").requires_grad_(step < 4)
        run_step(model, ShardedSetup().gradients(step))
    _, resumed = ShardedSetup().wrap(ShardedInt8(stochastic_rounding=True))
    resumed.restore(sync.state())
    return [int(unit._state["seed"]) for unit in sync.units], resumed.state().num_syncs


def test_units_ranks_and_steps_round_with_different_numbers() -> None:
    """If it fails, roundings of several ranks, or of two steps, add up instead of averaging out."""
    for rank, (seeds, num_syncs) in enumerate(run_ranks(_seeds)):
        assert len(seeds) > 1
        assert num_syncs == 5
        assert seeds == [first_seed(unit, rank) + 5 for unit in range(len(seeds))]


def _received_residuals() -> tuple[Tensor, Tensor]:
    """Returns the averages of two steps whose gradients are zero, before which residuals are added."""
    model, sync = ShardedSetup().wrap(ShardedInt8(error_feedback=True))
    nothing = {name: torch.zeros(p.shape) for name, p in new_model().named_parameters()}
    sync.add_residuals({name: zeros + 1.0 + dist.get_rank() for name, zeros in nothing.items()})
    return flatten(run_step(model, nothing)), flatten(run_step(model, nothing))


def test_added_residuals_are_sent_once() -> None:
    """If it fails, what another plan has left is lost or sent twice, of matrices or of what travels uncompressed."""
    for first, second in run_ranks(_received_residuals):
        torch.testing.assert_close(first, torch.full_like(first, 1.5), rtol=0.01, atol=0)
        assert second.abs().max() < 0.02


def _in_all_dtypes() -> list[tuple[float, torch.dtype]]:
    return [_in_16_bits(reduce_dtype) for reduce_dtype in (torch.float32, torch.bfloat16, torch.float16)]


def _in_16_bits(reduce_dtype: torch.dtype) -> tuple[float, torch.dtype]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    setup = ShardedSetup(options={"mp_policy": policy})
    model, _ = setup.wrap(ShardedInt8())
    gradients = ShardedSetup().gradients(0)
    averages = flatten(run_step(model, gradients))
    exact = torch.stack(values_of_all_ranks(flatten(gradients))).mean(0)
    grad = next(model.parameters()).grad
    assert grad is not None
    return float((averages - exact).norm() / exact.norm()), grad.dtype


def test_mixed_precision() -> None:
    """If it fails, gradients of modules that compute in bfloat16 are wrong."""
    for error, dtype in chain(*run_ranks(_in_all_dtypes)):
        assert error < 0.02
        assert dtype == torch.float32


def _refuse_own_factor() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model.set_gradient_divide_factor(3.0)  # type: ignore[operator]
    with pytest.raises(OptionError, match=r"factor exclude each other; it was called on the unit of 0\.weight"):
        ShardedSync(ShardedInt8()).attach(model)


def test_an_own_divide_factor_is_refused() -> None:
    """If it fails, a factor that the user has set is replaced in silence."""
    run_ranks(_refuse_own_factor)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "int8", "block_size": 100}, "block_size must be a power of two from 16 to 256, got 100"),
        ({"name": "int8", "error_feedback": True, "stochastic_rounding": True}, "exclude each other"),
        ({"name": "int4", "stochastic_rounding": True}, "'int4' has no option 'stochastic_rounding'"),
        ({"name": "int4", "error_feedback": 2}, "error_feedback must be"),
        ({"block_size": 128}, "has no 'name' in {'block_size': 128}"),
        ("hierarchical", "'hierarchical' needs the option 'inner'"),
        ({"name": "hierarchical", "inner": None}, "inner must be 'bf16', 'int8' or 'int4'.*, got None"),
        ({"name": "hierarchical", "inner": {"name": "hierarchical", "inner": "bf16"}}, "inner must be 'bf16'"),
        ({"name": "hierarchical", "inner": "powersgd"}, "'powersgd' averages whole gradients on every rank"),
        ({"name": "hierarchical", "inner": "int8", "ranks_per_node": 0}, "ranks_per_node must be"),
    ],
)
def test_values(config: Any, message: str) -> None:
    """If it fails, a wrong option is noticed late, or not at all."""
    with pytest.raises(ValueError, match=message):
        sharded_from_config(config)


def test_names() -> None:
    """If it fails, a configuration makes another compressor."""
    assert sharded_from_config("INT-8") == ShardedInt8()
    assert sharded_from_config({"name": "int4", "error_feedback": True}) == ShardedInt4(error_feedback=True)
    assert sharded_from_config("none") is sharded_from_config(None) is None
    on_nodes = ShardedHierarchical(inner=ShardedInt8(error_feedback=True, block_size=64), ranks_per_node=2)
    assert sharded_from_config(compressor_to_config(on_nodes)) == on_nodes
    assert sharded_from_config({"name": "hierarchical", "inner": "bf16"}) == ShardedHierarchical(inner=ShardedBf16())


@pytest.mark.exhaustive
def test_errors_of_a_step() -> None:
    """If it fails, claims are looser than what is true by a factor that hides faults."""
    ((bf16, int8, int4),) = set(map(tuple, run_ranks(_errors)))
    assert 0.0005 < bf16 < 0.003
    assert 0.003 < int8 < 0.009
    assert 0.05 < int4 < 0.12


def _errors() -> list[float]:
    errors = []
    for compressor in (ShardedBf16(), ShardedInt8(), ShardedInt4()):
        steps = run_steps(ShardedSetup(), compressor)
        exact = torch.stack(values_of_all_ranks(steps.sent)).mean(0)
        errors.append(float((steps.received - exact).norm() / exact.norm()))
    return errors


def _comm_objects_after_detach() -> tuple[bool, bool]:
    """Returns whether the reduce-scatter is ours while attached, and each unit's own again after it."""
    model, sync = ShardedSetup().wrap(ShardedBf16())
    assert forces_sum(model.parts[0])
    sync.detach()
    fsdps = comm_object(model, "reduce_scatter")
    own = type("Own", (type(fsdps),), {})()
    model.set_custom_reduce_scatter(own)
    model.set_force_sum_reduction_for_comms(True)
    again = ShardedSync(ShardedInt8())
    again.attach(model)
    is_ours = isinstance(comm_object(model, "reduce_scatter"), UnitReduceScatter)
    again.detach()
    of_part = comm_object(model.parts[0], "reduce_scatter")
    are_sums = forces_sum(model), forces_sum(model.parts[0])
    is_own = comm_object(model, "reduce_scatter") is own and type(of_part) is type(fsdps)
    return is_ours, is_own and are_sums == (True, False)


def test_an_own_comm_object_comes_back() -> None:
    """If it fails, a fit with a compressor takes a user's reduce-scatter, or its wish for sums, away for good."""
    assert run_ranks(_comm_objects_after_detach) == [(True, True)] * 2


class _Spectral(nn.Module):
    """Has a complex matrix, as Fourier layers do, beside a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Linear(16, 16)
        fully_shard(self.real)
        self.weight = nn.Parameter(torch.randn(16, 8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.real(x).to(torch.complex64) @ self.weight).abs().sum()


def _complex_gradients() -> tuple[Tensor, Tensor, list[str]]:
    averages, texts = [], []
    for compressor in (None, ShardedInt8()):
        torch.manual_seed(0)
        model: Any = fully_shard(_Spectral())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if compressor is not None:
                ShardedSync(compressor).attach(model)
            torch.manual_seed(dist.get_rank())
            model(torch.randn(4, 16)).backward()
        averages.append(model.weight.grad.full_tensor())
        texts += [str(warning.message) for warning in caught if "comm_hook" in str(warning.message)]
    return averages[0], averages[1], texts


def test_complex_gradients_are_sent_uncompressed() -> None:
    """If it fails, their imaginary parts are lost."""
    for expected, average, texts in run_ranks(_complex_gradients):
        torch.testing.assert_close(average, expected)
        assert texts == ["comm_hook sends complex gradients uncompressed: it compresses only floating-point gradients."]
