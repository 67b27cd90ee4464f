"""CommOptDiLoCo for Fabric on real ranks, compared with the same training in plain torch on one."""

import gc
import pickle
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from lightning_commopt import CommOptDiLoCo as TrainerCommOptDiLoCo
from lightning_commopt import CommPlan, DiLoCoPlan, OptionError
from lightning_commopt.compat.lightning import MisconfigurationException
from lightning_commopt.fabric import CommOptDiLoCo
from lightning_commopt.sync.diloco.errors import UnequalStepsError
from support.collectives import counted_collectives, needs_hooks
from support.cross_section import sampled
from support.fabric_training import Net, adam, loss_of, numbers
from support.strategy_models import Params, assert_same
from support.warm_ranks import run_ranks

STEPS = 8
_MEAN: dict[str, Any] = {"sync_every": 3, "outer_lr": 1.0, "outer_momentum": 0.0}
_DILOCO: dict[str, Any] = {"sync_every": 3, "outer_lr": 0.7, "outer_momentum": 0.9}
_OVERLAPPED = {**_DILOCO, "overlap": 1, "mixing": 0.25}


def started(**options: Any) -> tuple[Fabric, CommOptDiLoCo]:
    """Returns Fabric on the ranks of the group, launched, and its strategy."""
    strategy = CommOptDiLoCo(**options)
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    return fabric, strategy


def _train(options: dict[str, Any]) -> dict[str, Any]:
    with counted_collectives(all_groups=True) as counted:
        return _train_counted(options, counted)


def _train_counted(options: dict[str, Any], counted: Counter[str]) -> dict[str, Any]:
    fabric, strategy = started(**options)
    net = Net()
    if fabric.global_rank > 0:
        net.load_state_dict({name: x + 1 for name, x in net.state_dict().items()})
    model, optimizer = fabric.setup(net, adam(net))
    losses, collectives, reduced = list[float](), list[int](), list[Any]()
    for step in range(STEPS):
        before = counted.total()
        with fabric.no_backward_sync(model, enabled=step % 2 == 0):
            loss = loss_of(model, fabric.global_rank, step)
            fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5 + fabric.global_rank)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        collectives.append(counted.total() - before)
        reduced.append(fabric.all_reduce(loss.detach(), reduce_op="sum"))
    fabric.barrier()
    own = numbers(net)
    with strategy.global_weights():
        shown = numbers(net)
    assert_same(numbers(net), own)
    strategy.finish()
    return {
        "losses": losses,
        "collectives": collectives,
        "reduced": [x.item() for x in reduced],
        "is_bare": model._forward_module is net,
        "final": numbers(net),
        "shown": shown,
        "own": own,
        "bytes": strategy.wire_bytes,
        "from_rank_0": fabric.broadcast(fabric.global_rank),
    }


class _Reference:
    """DiLoCo of several workers in plain torch on one rank, with one fragment."""

    def __init__(self, plan: DiLoCoPlan, world_size: int) -> None:
        self.plan = plan
        self.nets = [Net() for _ in range(world_size)]
        self.optimizers = [adam(net) for net in self.nets]
        self.weights = [nn.Parameter(x.detach().clone()) for x in Net().parameters()]
        self.outer = torch.optim.SGD(self.weights, plan.outer_lr, plan.outer_momentum, nesterov=plan.nesterov)
        self.buffers = [x.clone() for x in Net().buffers()]
        self.arriving: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def train(self) -> Iterator[list[float]]:
        """Yields the losses of all workers in each step."""
        for step in range(STEPS):
            losses = []
            for rank, (net, optimizer) in enumerate(zip(self.nets, self.optimizers, strict=True)):
                loss = loss_of(net, rank, step)
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.5 + rank)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            if (step + 1) % self.plan.sync_every == 0:
                self._exchange(step + 1 + self.plan.overlap)
            if step + 1 in self.arriving:
                self._apply(*self.arriving.pop(step + 1), self.plan.own_share)
            yield losses

    def _exchange(self, due: int) -> None:
        for weights, mean in zip(self.weights, self._means(), strict=True):
            weights.grad = weights - mean
        self.outer.step()
        self.arriving[due] = [x.detach().clone() for x in self.weights], self._buffers()

    @torch.no_grad()
    def _means(self) -> list[Tensor]:
        return [torch.stack(own).mean(0) for own in zip(*(net.parameters() for net in self.nets), strict=True)]

    def _buffers(self) -> list[Tensor]:
        own = [*zip(*(net.buffers() for net in self.nets), strict=True)]
        return [torch.stack(x).mean(0) if x[0].is_floating_point() else x[0].clone() for x in own]

    @torch.no_grad()
    def _apply(self, weights: list[Tensor], buffers: list[Tensor], own_share: float) -> None:
        for net in self.nets:
            for x, value in zip(net.parameters(), weights, strict=True):
                x.lerp_(value, 1 - own_share)
            for buffer, value in zip(net.buffers(), buffers, strict=True):
                buffer.copy_(value)

    def finish(self) -> Params:
        assert not self.arriving
        self._apply(self._means(), self._buffers(), 0)
        return numbers(self.nets[0])


def _assert_close(got: Params, expected: Params) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-6, atol=2e-6, err_msg=name)


@needs_hooks
@pytest.mark.parametrize(
    ("options", "world_size"),
    [
        pytest.param(_OVERLAPPED, 2, id="overlapped"),
        pytest.param(_DILOCO, 3, id="three_ranks"),
        pytest.param(_MEAN, 2, id="mean", marks=pytest.mark.exhaustive),
        pytest.param({**_DILOCO, "sync_every": 1}, 2, id="every_step", marks=pytest.mark.exhaustive),
    ],
)
def test_equals_plain_torch(options: dict[str, Any], world_size: int) -> None:
    """If it fails, Fabric trains something else than DiLoCo, or ranks wait for each other between two exchanges."""
    ranks = run_ranks(_train, options, world_size=world_size)
    reference = _Reference(DiLoCoPlan(**options), world_size)
    losses = [*reference.train()]
    np.testing.assert_allclose([[r["losses"][step] for r in ranks] for step in range(STEPS)], losses, rtol=1e-5)
    for rank, got in enumerate(ranks):
        _assert_close(got["own"], numbers(reference.nets[rank]))
        assert_same(got["shown"], ranks[0]["shown"])
    shown = dict(zip(dict(Net().named_parameters()), reference.weights, strict=True))
    _assert_close(ranks[0]["shown"], {name: x.detach().double().numpy() for name, x in shown.items()})
    final, every, overlap = reference.finish(), options["sync_every"], options.get("overlap", 0)
    for got in ranks:
        _assert_close(got["final"], final)
        assert_same(got["final"], ranks[0]["final"])
        for step, number in enumerate(got["collectives"][1:], 2):  # in the first one ranks compare their weights
            if step % every > overlap:
                assert number == 0, step
        assert sum(got["collectives"][1:]) > 0
        np.testing.assert_allclose(got["reduced"], [sum(of_step) for of_step in losses], rtol=1e-5)
        assert (got["is_bare"], got["from_rank_0"]) == (True, 0)
        assert got["bytes"] > 4 * sum(x.numel() for x in Net().parameters()) * (STEPS // every)


def _alone() -> tuple[Params, int]:
    with pytest.warns(UserWarning, match="comm_hook has no effect: there is only one process"):
        trained = _train({**_DILOCO, "comm_hook": "int8"})
    return trained["final"], trained["bytes"]


@needs_hooks
def test_one_process() -> None:
    """If it fails, one process needs others, or has another outer optimizer than several."""
    ((got, num_bytes),) = run_ranks(_alone, world_size=1)
    reference = _Reference(DiLoCoPlan(**_DILOCO), 1)
    assert len([*reference.train()]) == STEPS
    _assert_close(got, reference.finish())
    assert num_bytes == 0


def _step(fabric: Fabric, model: nn.Module, optimizer: Any, step: int = 0) -> None:
    fabric.backward(loss_of(model, fabric.global_rank, step))
    optimizer.step()
    optimizer.zero_grad()


def _load_late_and_unfreeze() -> tuple[Params, Params, Params, list[str]]:
    fabric, strategy = started(sync_every=2, outer_lr=1.0, outer_momentum=0.0)
    net = Net()
    net.last.requires_grad_(False)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    later = {name: x + 0.5 for name, x in Net().state_dict().items()}
    model.load_state_dict(later)
    _step(fabric, model, optimizer)
    with strategy.global_weights():
        begun = numbers(net)
        with pytest.raises(MisconfigurationException) as caught:
            optimizer.step()
    torch.nn.init.constant_(net.last.bias, fabric.global_rank)  # no rank exchanges what is frozen
    net.last.requires_grad_(True)
    _step(fabric, model, optimizer, 1)
    exchanged = numbers(net)
    strategy.finish()
    _step(fabric, model, optimizer, 2)
    _step(fabric, model, optimizer, 3)
    return begun, exchanged, numbers(net), [str(caught.value)]


def test_what_a_loop_changes_after_setup() -> None:
    """If it fails, weights that were loaded late, or parameters that were unfrozen, are not what is exchanged."""
    (begun, exchanged, again, (told,)), second = run_ranks(_load_late_and_unfreeze)
    for name, x in Net().named_parameters():
        np.testing.assert_array_equal(begun[name], (x + 0.5).detach().double().numpy())
        assert (exchanged[name] != begun[name]).any(), name
    assert_same(exchanged, second[1])
    assert_same(again, second[2])
    assert "steps within strategy.global_weights()" in told


def _several() -> list[Any]:
    fabric, strategy = started(sync_every=2)
    teacher = fabric.setup_module(nn.Linear(6, 1).requires_grad_(False))
    net = Net()
    late = torch.optim.SGD(net.last.parameters(), lr=0.1)
    model, first, second = fabric.setup(net, torch.optim.SGD(net.first.parameters(), lr=0.1), late)
    told, steps = [], []
    with pytest.raises(MisconfigurationException) as caught:
        fabric.setup_module(Net())
    told.append(str(caught.value))
    for step in range(3):
        fabric.backward(loss_of(model, fabric.global_rank, step))
        for optimizer in (second, first):
            optimizer.step()
            assert strategy.rounds is not None
            steps.append(strategy.rounds.num_steps)
        model.zero_grad()
    other = Net()
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        strategy.finish()
        strategy.finish()
        fabric.setup(other, adam(other))
        strategy.finish()
    told += [str(warning.message) for warning in caught_warnings]
    return [numbers(teacher), numbers(net), told, steps]


def test_several_modules_and_optimizers() -> None:
    """If it fails, a second module trains without exchanges, or the wrong optimizer's steps count."""
    first, second = run_ranks(_several)
    assert_same(first[0], second[0])
    assert_same(first[1], second[1])
    assert "trains one module at a time" in first[2][0]
    assert "outer_momentum=0.9 is likely to be too large for sync_every=2 and 1 exchange: compare" in first[2][1]
    assert "no step was counted before finish" in first[2][2]
    assert first[3] == [0, 1, 1, 2, 2, 3]


def _scales() -> list[float]:
    strategy = CommOptDiLoCo(sync_every=3)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=256.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[plugin])
    fabric.launch()
    net = nn.Linear(6, 1)
    model, optimizer = fabric.setup(net, adam(net))
    scales = []
    for step in range(4):
        loss = loss_of(model, fabric.global_rank, step)
        fabric.backward(loss * float("inf") if step == 1 and fabric.global_rank == 1 else loss)
        optimizer.step()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.exhaustive
def test_ranks_agree_on_the_loss_scale() -> None:
    """If it fails, gradient scalers drift apart for good."""
    assert run_ranks(_scales) == [[256, 256, 128, 128], [256, 128, 128, 128]]


def _unequal(num_more: int) -> Params:
    fabric, strategy = started(sync_every=2, overlap=1)
    net = Net()
    model, optimizer = fabric.setup(net, adam(net))
    for step in range(4 + num_more * fabric.global_rank):
        _step(fabric, model, optimizer, step)
    strategy.finish()
    return numbers(net)


def _too_unequal() -> str:
    with pytest.raises(UnequalStepsError) as caught:
        _unequal(2)
    return str(caught.value)


def test_unequal_numbers_of_steps() -> None:
    """If it fails, a rank with one more batch waits for the others, or ranks end with different weights."""
    first, second = run_ranks(_unequal, 1)
    assert_same(first, second)
    for told in run_ranks(_too_unequal):
        assert "of optimizer steps: rank 0 has ended after step 4, rank 1 is at step 6. All ranks must" in told


def _two_losses(is_early: bool) -> Params:
    fabric, strategy = started(sync_every=2)
    net = Net()
    first, *others = net.parameters()
    model, optimizer, other = fabric.setup(net, *(torch.optim.SGD(x, lr=0.1) for x in ([first], others)))
    for step in range(4):
        losses = [loss_of(model, fabric.global_rank, step), loss_of(model, fabric.global_rank, step)]
        fabric.backward(losses[0])
        optimizer.step()
        fabric.backward(losses[1] if is_early else loss_of(model, fabric.global_rank, step))
        other.step()
    strategy.finish()
    return numbers(net)


def _early_loss() -> str:
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        _two_losses(True)
    return str(caught.value)


def test_a_loss_from_before_an_exchange_gets_a_remedy() -> None:
    """If it fails, a training of two losses that DDP takes ends in an error that names neither cause nor remedy."""
    first, second = run_ranks(_two_losses, False)
    assert_same(first, second)
    for told in run_ranks(_early_loss):
        assert "With CommOptDiLoCo an exchange may modify all weights after a step of the optimizer" in told


def _warnings_at_its_end(folder: str, ending: str) -> list[str]:
    fabric, strategy = started(sync_every=2)
    net = Net()
    model, optimizer = fabric.setup(net, adam(net))
    for step in range(4 if ending == "at an exchange" else 5):
        _step(fabric, model, optimizer, step)
    if ending == "finished":
        strategy.finish()
    if ending == "saved":
        fabric.save(f"{folder}/checkpoint", {"model": model, "optimizer": optimizer})
    if ending == "global weights saved":
        fabric.save(f"{folder}/checkpoint", {"model": model})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del fabric, model, optimizer, strategy, net
        gc.collect()
    return [str(warning.message) for warning in caught]


_ENDINGS = ["global weights saved", "at an exchange", "saved", "finished"]


@pytest.mark.parametrize("ending", sampled(_ENDINGS, by_default=["global weights saved", "saved"]))
def test_a_training_that_is_not_finished_says_so(ending: str, tmp_path: Any) -> None:
    """If it fails, steps after the last exchange are lost in silence, or a training that lost nothing warns."""
    first, second = run_ranks(_warnings_at_its_end, str(tmp_path), ending)
    assert second == []
    assert len(first) == (ending == "global weights saved")
    assert all("has ended after 5 steps without strategy.finish()" in text for text in first)


def test_ranks_can_be_spawned() -> None:
    """If it fails, start_method="spawn" ends in an error of pickle."""
    strategy = CommOptDiLoCo(start_method="spawn", sync_every=7, comm_hook="int8")
    assert pickle.loads(pickle.dumps(strategy)).plan == strategy.plan


def _setup_synchronized() -> tuple[str, str]:
    fabric, _ = started()
    with pytest.raises(OptionError) as of_module:
        fabric.setup_module(nn.SyncBatchNorm(4))
    model = fabric.setup_module(Net())
    with pytest.raises(OptionError) as of_optimizer:
        fabric.setup_optimizers(ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1))
    return str(of_module.value), str(of_optimizer.value)


def test_refused(tmp_path: Any) -> None:
    """If it fails, an option that cannot apply in Fabric is ignored, or its error says nothing."""
    refused: list[tuple[Mapping[str, Any], str]] = [
        ({"eval_weights": "local"}, r"eval_weights='local' cannot apply in Fabric: strategy.global_weights\(\) shows"),
        ({"inner": "ddp"}, "inner='ddp' cannot apply in Fabric: each rank is a worker of its own"),
        ({"patience_s": 60}, "patience_s=60 cannot apply in Fabric: all ranks must take part"),
        ({"sigterm_every_n_steps": 5}, "sigterm_every_n_steps=5 cannot apply in Fabric: your loop decides"),
        ({"uneven_batches": "pad"}, "uneven_batches='pad' cannot apply in Fabric: your loop must take"),
        ({"plan": DiLoCoPlan(eval_weights="local")}, "eval_weights='local' cannot apply in Fabric"),
        ({"plan": DiLoCoPlan(inner=CommPlan(static_graph=True))}, "inner=CommPlan.*cannot apply in Fabric"),
        ({"sync_every": 0}, "sync_every must be an integer of at least 1, got 0"),
        ({"bucket_cap_mb": 5}, "bucket_cap_mb is an option of DDP, and DiLoCo does not use DDP in Fabric"),
        ({"sync_evry": 5}, "unknown option 'sync_evry'; known options: .*; did you mean 'sync_every'"),
        ({"save_comm_state": "no"}, "save_comm_state must be true or false, got 'no'"),
    ]
    for options, message in refused:
        with pytest.raises(OptionError, match=message):
            CommOptDiLoCo(**options)
    with pytest.raises(ValueError, match=r"for Fabric there is lightning_commopt\.fabric\.CommOptDiLoCo"):
        Fabric(accelerator="cpu", strategy=TrainerCommOptDiLoCo())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"for a Trainer there is lightning_commopt\.CommOptDiLoCo"):
        Trainer(accelerator="cpu", strategy=CommOptDiLoCo())  # type: ignore[arg-type]
    DiLoCoPlan(sync_every=7).save(tmp_path / "plan.json")
    assert CommOptDiLoCo.from_plan(tmp_path / "plan.json").plan == DiLoCoPlan(sync_every=7)
    for of_module, of_optimizer in run_ranks(_setup_synchronized):
        assert "use BatchNorm, whose statistics the exchanges average" in of_module
        assert of_optimizer.startswith("ZeroRedundancyOptimizer divides each step among ranks that DiLoCo trains inde")
