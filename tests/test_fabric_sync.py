"""Fabric's gradient sync on real ranks: its state in checkpoints, changes of plan, and what observers see."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn

from lightning_commopt.compressors import AllReduce, PowerSGD
from lightning_commopt.fabric import CommOptDDP
from lightning_commopt.measure.observer import BucketInfo, BucketSync, BucketSyncs, SyncObserver
from lightning_commopt.plan import CommPlan
from lightning_commopt.sync.checkpoint import KEY, open_checkpoint
from lightning_commopt.sync.ddp.hook import GradientSyncError
from support.warm_ranks import run_ranks

HALF = 5
POWERSGD = PowerSGD(min_compression_rate=0.5)
COMPRESSORS: dict[str, Any] = {"powersgd": POWERSGD, "int8": "int8"}
Trained = dict[str, np.ndarray]


class Training:
    """Two modules and their optimizers in Fabric; data depend on the step and the rank only."""

    def __init__(self, **options: Any) -> None:
        self.strategy = CommOptDDP(bucket_cap_mb=0.002, **options)
        self.fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=self.strategy)
        self.fabric.launch()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 24))
        self.head = nn.Linear(24, 8)
        self.state: dict[str, Any] = {"step": 0}

    def set_up(self) -> "Training":
        for name, module in (("body", self.body), ("head", self.head)):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
            self.state[name], self.state[f"{name}_optimizer"] = self.fabric.setup(module, optimizer)
        return self

    def loss(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.state["step"] + self.fabric.global_rank)
        x = torch.randn(8, 16, generator=generator)
        return (self.state["head"](self.state["body"](x).tanh()) - x.mean()).square().mean()

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.fabric.backward(self.loss())
            for name in ("body_optimizer", "head_optimizer"):
                self.state[name].step()
                self.state[name].zero_grad()
            self.state["step"] += 1

    def trained(self) -> Trained:
        return {
            f"{owner}.{name}": value.detach().numpy().copy()
            for owner, module in (("body", self.body), ("head", self.head))
            for name, value in module.named_parameters()
        }


def _train_through(folder: str, options: dict[str, Any]) -> dict[str, Trained]:
    trained = {}
    for name, compressor in COMPRESSORS.items():
        training = Training(comm_hook=compressor, **options).set_up()
        training.train(HALF)
        training.fabric.save(Path(folder, name), training.state)
        training.train(HALF)
        trained[name] = training.trained()
    return trained


def _resume(folder: str, options: dict[str, Any], loads_first: bool) -> dict[str, Trained]:
    trained = {}
    for name, compressor in COMPRESSORS.items():
        training = Training(comm_hook=compressor, **options)
        if loads_first:
            training.fabric.load(Path(folder, name), {"body": training.body, "head": training.head})
        training.set_up()
        optimizers = {key: value for key, value in training.state.items() if not isinstance(value, nn.Module)}
        state = optimizers if loads_first else training.state
        with warnings.catch_warnings():
            if loads_first:
                warnings.filterwarnings("ignore", message=".*state of comm_hook for 'body', 'head' is not used")
            remainder = training.fabric.load(Path(folder, name), state)
        assert KEY not in remainder
        training.state |= state
        training.train(HALF)
        trained[name] = training.trained()
    return trained


@pytest.mark.parametrize(
    ("options", "loads_first"),
    [({}, False), ({"static_graph": True}, True)],
    ids=["loaded_after_setup", "loaded_before_setup"],
)
def test_resumed_training_goes_on_bit_for_bit(tmp_path: Path, options: dict[str, Any], loads_first: bool) -> None:
    """If it fails, residuals or factors are lost where a Fabric run is resumed."""
    through = run_ranks(_train_through, str(tmp_path), options)
    resumed = run_ranks(_resume, str(tmp_path), options, loads_first)
    for before, after in zip(through, resumed, strict=True):
        for name in COMPRESSORS:
            for key, value in before[name].items():
                np.testing.assert_array_equal(after[name][key], value, err_msg=f"{name} {key}")


def _save_variants(folder: str) -> None:
    training = Training(comm_hook=POWERSGD).set_up()
    training.train(HALF)
    training.fabric.save(Path(folder, "all"), training.state)
    weights = {name: training.state[name] for name in ("body", "head")}
    training.fabric.save(Path(folder, "weights"), weights)
    without = Training(comm_hook=POWERSGD, save_comm_state=False).set_up()
    without.train(1)
    without.fabric.save(Path(folder, "without"), without.state)


def _load_on_other_ranks(folder: str) -> list[str]:
    training = Training(comm_hook=POWERSGD).set_up()
    training.fabric.load(Path(folder, "all"), training.state)
    gathered = Path(folder, f"on_{training.fabric.world_size}")
    training.fabric.save(gathered, training.state)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.fabric.load(Path(folder, "all"))
        training.fabric.load(Path(folder, "weights"), {"body": training.state["body"]})
    return [str(warning.message) for warning in caught if "comm_hook" in str(warning.message)]


def _residuals_in(path: Path) -> list[dict[str, np.ndarray]]:
    """Returns what each rank keeps in ``body``: the only dtype is float32, and all buckets are dense."""
    saved = torch.load(path, weights_only=True)[KEY]["body"]
    size = len(saved["ranks"])
    states = [open_checkpoint(saved).of_rank(rank, size, POWERSGD) for rank in range(size)]
    return [{name: value.numpy() for name, value in state.all_residuals().items()} for state in states]


def test_other_numbers_of_ranks_and_what_a_file_holds(tmp_path: Path) -> None:
    """If it fails, the sum of residuals changes with the number of ranks, or they are lost without a warning."""
    run_ranks(_save_variants, str(tmp_path))
    assert set(torch.load(tmp_path / "all", weights_only=True)[KEY]) == {"body", "head"}
    assert KEY not in torch.load(tmp_path / "weights", weights_only=True)
    assert KEY not in torch.load(tmp_path / "without", weights_only=True)
    messages, *_ = run_ranks(_load_on_other_ranks, str(tmp_path), world_size=3)
    assert len(messages) == 1
    assert "'body', 'head' is not used: no module is loaded under that name" in messages[0]
    before, after = _residuals_in(tmp_path / "all"), _residuals_in(tmp_path / "on_3")
    assert any(np.abs(value).max() > 0 for value in before[0].values())
    for name, value in before[0].items():
        mean = (value + before[1][name]) / 2
        for residuals in after:
            np.testing.assert_allclose(residuals[name], mean, rtol=1e-6, atol=1e-9)


class _Counting(SyncObserver):
    def __init__(self) -> None:
        self.names: set[str] = set()

    def ready(self, bucket: BucketInfo) -> BucketSync:
        self.names.update(bucket.names)
        return BucketSyncs([])


def _change_plans(plans: list[Any]) -> tuple[Trained, bool, int, int, set[str], int]:
    training, observer, calls = Training().set_up(), _Counting(), list[Any]()
    wrappers = [training.state[name]._forward_module for name in ("body", "head")]
    handle = wrappers[0].register_forward_hook(lambda *args: calls.append(args))
    training.strategy.sync_observers.add(observer)
    for plan in plans:
        training.train(2)
        if plan is not None:
            training.state["head"].requires_grad_(False)  # as a discriminator while its generator steps
            training.strategy.apply_plan(plan)
            training.state["head"].requires_grad_(True)
    native = training.strategy.wire_bytes
    handle.remove()
    training.train(2)
    are_same = wrappers == [training.state[name]._forward_module for name in ("body", "head")]
    return training.trained(), are_same, native, training.strategy.wire_bytes, observer.names, len(calls)


def test_apply_plan_between_lossless_plans() -> None:
    """If it fails, a change of plan in Fabric leaves references or hooks to a dead wrapper, or trains otherwise."""
    plans = [CommPlan(comm_hook=AllReduce(), bucket_cap_mb=1), CommPlan(static_graph=True), "all_reduce"]
    changed, unchanged = run_ranks(_change_plans, plans), run_ranks(_change_plans, [None] * len(plans))
    for (ours, are_same, _, sent, names, num_calls), (ddp, _, earlier, sent_by_ddp, no_names, _) in zip(
        changed, unchanged, strict=True
    ):
        assert are_same
        assert num_calls == 2 * len(plans)
        assert sent == sent_by_ddp > earlier > 0
        assert names == {"0.weight", "0.bias", "2.weight", "2.bias", "weight", "bias"}
        assert no_names == set()
        for name, value in ddp.items():
            np.testing.assert_array_equal(ours[name], value, err_msg=name)


def _change_too_late() -> str:
    training = Training().set_up()
    loss = training.loss()
    training.strategy.apply_plan("bf16")
    with pytest.raises(GradientSyncError) as caught:
        training.fabric.backward(loss)
    training.train(1)
    return str(caught.value)


def test_apply_plan_between_forward_and_backward() -> None:
    """If it fails, ranks train apart without a word, as the old wrapper hears of no gradient."""
    for message in run_ranks(_change_too_late):
        assert "call apply_plan before forward or after backward" in message


def _syncs_of_accumulating(**options: Any) -> int:
    training = Training(**options).set_up()
    training.train(1)
    earlier = training.strategy.wire_bytes
    with (
        training.fabric.no_backward_sync(training.state["body"]),
        training.fabric.no_backward_sync(training.state["head"]),
    ):
        training.fabric.backward(training.loss())
    return training.strategy.wire_bytes - earlier


def _accumulate() -> list[int]:
    return [_syncs_of_accumulating(static_graph=True), _syncs_of_accumulating(static_graph=True, comm_hook="bf16")]


def test_a_static_graph_that_is_recorded_accumulates_without_sync() -> None:
    """If it fails, the first accumulated batch is synchronized though an earlier backward has recorded the graph."""
    assert run_ranks(_accumulate) == [[0, 0], [0, 0]]


class _Branching(nn.Module):
    """Uses one of its layers only if told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, *, uses_both: bool) -> torch.Tensor:
        return self.always(x) + self.sometimes(x) if uses_both else self.always(x)


def _accumulate_over_a_change(changes: bool) -> list[float]:
    strategy = CommOptDDP(find_unused_parameters=True)
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(_Branching())
    x = torch.full((2, 4), 1.0 + fabric.global_rank)
    with fabric.no_backward_sync(model):
        fabric.backward(model(x, uses_both=True).sum())
    if changes:
        strategy.apply_plan(CommPlan(find_unused_parameters=True, bucket_cap_mb=100))
    fabric.backward(model(x, uses_both=False).sum())
    gradients = [x.grad for x in model.parameters() if x.grad is not None]
    return torch.cat([gradient.flatten() for gradient in gradients]).tolist()


def test_gradients_that_were_accumulated_before_a_change_are_averaged() -> None:
    """If it fails, DDP leaves those alone, different on all ranks, that the last backward does not use."""
    expected = run_ranks(_accumulate_over_a_change, False)
    assert run_ranks(_accumulate_over_a_change, True) == expected
    assert expected[0] == expected[1]
