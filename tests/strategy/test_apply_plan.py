"""Plans that change in the middle of a fit."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_commopt import AllReduce, CommOptDDP, CommPlan, ErrorFeedback, PowerSGD
from lightning_commopt.compressors import LowRank
from lightning_commopt.plan import OptionError
from lightning_commopt.strategy.base import check_plans_agree
from support.cross_section import sampled
from support.lightnings import Callback, DDPStrategy, LightningModule, Trainer
from support.own_compressors import Averages
from support.ranks import run_ranks_or_raise
from support.strategy_models import FEATURES, Manual, Params, Tiny, Unused, assert_same, loader, numbers, trainer
from support.warm_ranks import run_ranks

_LOSSLESS: dict[str, dict[str, Any]] = {
    "native": {},
    "all_reduce": {"comm_hook": "all_reduce", "bucket_cap_mb": 0.001},
    "view": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.002},
    "static": {"static_graph": True, "comm_hook": "all_reduce"},
}
_CHANGES = [
    *(("native", "all_reduce"), ("all_reduce", "view"), ("view", "static"), ("static", "native")),
    *(("native", "native"), ("native", "view"), ("static", "all_reduce")),
]
_POWERSGD = PowerSGD(matrix_rank=1, min_compression_rate=0.1)


class ChangePlan(Callback):
    """Applies a plan after the third batch of all, in one hook or another."""

    def __init__(self, plan: Any, within_batch: bool = False) -> None:
        self.plan = plan
        self.within_batch = within_batch

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if not self.within_batch and trainer.fit_loop.epoch_loop.total_batch_idx == 2:
            self._apply(trainer)

    def on_before_backward(self, trainer: Trainer, *args: Any) -> None:
        if self.within_batch and trainer.fit_loop.epoch_loop.total_batch_idx == 2:
            before = trainer.strategy.model
            self._apply(trainer)
            assert trainer.strategy.model is before, "a plan must wait for the end of the batch"

    def _apply(self, trainer: Trainer) -> None:
        assert isinstance(trainer.strategy, CommOptDDP)
        trainer.strategy.apply_plan(self.plan)


def _fit(
    before: dict[str, Any], after: dict[str, Any], module: LightningModule, within_batch: bool = False, **options: Any
) -> Params:
    strategy = CommOptDDP(**before)
    plan = CommPlan(**after)
    trainer(strategy, callbacks=[ChangePlan(plan, within_batch)], **options).fit(module, loader())
    assert strategy.plan == plan
    assert strategy._ddp_kwargs == plan.ddp_kwargs()
    return numbers(module)


def _fit_with_changes(accumulate: int, within_batch: bool) -> tuple[dict[str, Params], Params]:
    options = {"accumulate_grad_batches": accumulate}
    results = {
        f"{first} to {second}": _fit(_LOSSLESS[first], _LOSSLESS[second], Tiny(), within_batch, **options)
        for first, second in _CHANGES
    }
    uninterrupted = Tiny()
    trainer(DDPStrategy(), accumulate_grad_batches=accumulate).fit(uninterrupted, loader())
    return results, numbers(uninterrupted)


@pytest.mark.parametrize(
    ("accumulate", "within_batch"),
    sampled([(1, False), (1, True), (2, False)], by_default=[(1, True)]),
    ids=["between_batches", "within_batch", "within_accumulation"],
)
def test_lossless_plans_change_without_a_trace(accumulate: int, within_batch: bool) -> None:
    """If it fails, changing the plan loses or repeats gradients."""
    for results, expected in run_ranks(_fit_with_changes, accumulate, within_batch):
        for change, params in results.items():
            assert_same(params, expected, rtol=0.0 if accumulate == 1 else 1e-6, of=change)


def _fit_manual() -> tuple[Params, Params]:
    uninterrupted = Manual()
    trainer(DDPStrategy()).fit(uninterrupted, loader())
    static = {"static_graph": True, "bucket_cap_mb": 0.001}
    return _fit({}, static, Manual(), within_batch=False), numbers(uninterrupted)


def test_plan_changes_under_manual_optimization() -> None:
    """If it fails, a static graph that begins in the middle of a fit never synchronizes its first gradients."""
    changed, uninterrupted = run_ranks(_fit_manual)[0]
    assert_same(changed, uninterrupted)


class _Alternate(Callback):
    """Changes the plan after every batch."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        cap_mb = 0.001 if trainer.fit_loop.epoch_loop.total_batch_idx % 2 else 100
        assert isinstance(trainer.strategy, CommOptDDP)
        trainer.strategy.apply_plan(CommPlan(find_unused_parameters=True, bucket_cap_mb=cap_mb))


def _fit_unused() -> tuple[Params, Params]:
    fits = []
    for strategy, callbacks in ((CommOptDDP, [_Alternate()]), (DDPStrategy, [])):
        module = Unused(now_and_then=True)
        fit = trainer(strategy(find_unused_parameters=True), callbacks=callbacks, accumulate_grad_batches=3)
        fit.fit(module, loader(56))  # of the last two batches of three, the first uses a layer that the second does not
        fits.append(numbers(module))
    return fits[0], fits[1]


def test_a_plan_changes_after_the_only_batch_that_uses_a_layer() -> None:
    """If it fails, DDP does not average what was accumulated before, and ranks train different weights."""
    for changed, uninterrupted in run_ranks(_fit_unused):
        assert_same(changed, uninterrupted, rtol=1e-6)


class Linear(LightningModule):
    """Its gradient is the mean of the inputs, whatever its weight is: the weight sums all gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, FEATURES))
        self.fed = torch.zeros(8, FEATURES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        mixed = torch.outer(torch.linspace(-1, 1, 8), x.mean(0)) + torch.outer(torch.linspace(1, 2, 8).sin(), x[0] ** 2)
        self.fed += mixed
        return (self.weight * mixed).sum()

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class ChangeThrice(ChangePlan):
    """Applies three plans between the first epoch and the second."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Within a batch only the last one would take effect."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(trainer.strategy, CommOptDDP)
        for plan in ("all_reduce", "none", self.plan) if trainer.current_epoch == 0 else ():
            trainer.strategy.apply_plan(plan)


def _fit_lossy_then_lossless(compressor: Any, accumulate: int, change: Any) -> tuple[np.ndarray, np.ndarray]:
    module = Linear()
    strategy = CommOptDDP(comm_hook=compressor)
    trainer(strategy, callbacks=[change(CommPlan())], accumulate_grad_batches=accumulate).fit(module, loader())
    fed = module.fed / accumulate
    dist.all_reduce(fed)
    return -module.weight.detach().numpy(), (fed / dist.get_world_size()).numpy()


@pytest.mark.parametrize(
    ("compressor", "accumulate", "change"),
    [
        (_POWERSGD, 2, ChangePlan),
        (_POWERSGD, 1, ChangeThrice),
        pytest.param(
            *(ErrorFeedback(inner=LowRank(matrix_rank=2, min_compression_rate=0.1)), 1, ChangePlan),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["powersgd", "several_changes", "low_rank"],
)
def test_owed_gradients_are_paid_after_a_change(compressor: Any, accumulate: int, change: Any) -> None:
    """If it fails, what error feedback held back is lost when the plan changes, or changes again before a batch."""
    for applied, fed in run_ranks(_fit_lossy_then_lossless, compressor, accumulate, change):
        np.testing.assert_allclose(applied, fed, rtol=1e-5, atol=1e-5)


def _different_plans() -> str:
    strategy = CommOptDDP(bucket_cap_mb=1)
    plan = CommPlan(bucket_cap_mb=2 + dist.get_rank())
    try:
        trainer(strategy, callbacks=[ChangePlan(plan)]).fit(Tiny(), loader())
    finally:
        assert strategy.plan == CommPlan(bucket_cap_mb=1), "a refused plan must not stay"
        assert strategy._ddp_kwargs == {"bucket_cap_mb": 1}
    return ""


def test_ranks_with_different_plans_are_refused() -> None:
    """If it fails, ranks go on with different buckets, and hang."""
    for _, trace in run_ranks_or_raise(_different_plans, world_size=2):
        assert trace is not None
        assert (
            "OptionError: apply_plan must get the same plan on all ranks, got bucket_cap_mb=2 on rank 0,"
            " bucket_cap_mb=3 on rank 1" in trace
        )


class Threshold:
    """A setting without a repr of its own: the default one has an address in memory."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Own(Averages):
    """A user's compressor, not a dataclass, whose repr has an address too."""

    def __init__(self, threshold: Any) -> None:
        self.threshold = threshold


def _compare(settings: list[list[Any]]) -> list[str]:
    return [_compare_one([Own(setting) for setting in of_ranks]) for of_ranks in settings]


def _compare_one(compressors: list[Any]) -> str:
    own = [copy.deepcopy(compressors[dist.get_rank()]) for _ in range(2)]
    addresses = [0] * dist.get_world_size()
    dist.all_gather_object(addresses, id(own[0]))
    if dist.get_rank() == 1 and id(own[0]) == addresses[0]:
        own.pop(0)  # a repr with an address in it must differ
    try:
        check_plans_agree(CommPlan(comm_hook=own[0]))
    except OptionError as error:
        return str(error)
    return ""


def test_plans_are_compared_by_type_and_settings() -> None:
    """If it fails, a user's compressor without a repr never gets past apply_plan, or one that differs does."""
    same = [[Threshold(Threshold((torch.float16, {"a": 1})))] * 2, [np.max] * 2]
    others = [[Threshold(1), Threshold(2)], [[1, Threshold(3)], [1, Threshold(4)]]]
    differences = ["Own(threshold=Threshold(value=1)) on rank 0, comm_hook=Own(threshold=Threshold(v"]
    differences += ["Own(threshold=[1, Threshold(value=3)]) on rank 0"]
    for messages in run_ranks(_compare, same + others):
        assert messages[:2] == ["", ""]
        for message, difference in zip(messages[2:], differences, strict=True):
            assert f"got comm_hook={difference}" in message


def _fit_with_another_hook(change: Any) -> CommPlan:
    strategy = CommOptDDP(bucket_cap_mb=1, comm_hook="powersgd")
    trainer(strategy, callbacks=[ChangePlan(change)]).fit(Tiny(), loader())
    return strategy.plan


def test_a_name_applies_the_present_plan_with_that_comm_hook() -> None:
    """If it fails, apply_plan("bf16") raises an error about attributes, or forgets the other options."""
    expected = CommPlan.from_dict({"bucket_cap_mb": 1, "comm_hook": "bf16"})
    assert run_ranks(_fit_with_another_hook, "bf16") == [expected] * 2


class TryPlan(ChangePlan):
    """Applies a plan, and goes on when it is refused."""

    def _apply(self, trainer: Trainer) -> None:
        assert isinstance(trainer.strategy, CommOptDDP)
        before = trainer.strategy.plan, trainer.strategy.model
        with pytest.raises(OptionError, match="ranks_per_node must divide the number of ranks, 2, got 3"):
            super()._apply(trainer)
        assert (trainer.strategy.plan, trainer.strategy.model) == before


def _fit_with_refused_plan() -> tuple[Params, Params]:
    uninterrupted, interrupted = Tiny(), Tiny()
    trainer(CommOptDDP(bucket_cap_mb=0.001)).fit(uninterrupted, loader())
    plan = CommPlan.from_dict({"comm_hook": {"name": "hierarchical", "inner": "bf16", "ranks_per_node": 3}})
    tries = [TryPlan(plan), TryPlan(plan, within_batch=True)]
    trainer(CommOptDDP(bucket_cap_mb=0.001), callbacks=tries).fit(interrupted, loader())
    return numbers(interrupted), numbers(uninterrupted)


def test_plan_that_does_not_fit_the_ranks_is_refused_before_anything_changes() -> None:
    """If it fails, a fit whose callback catches the error goes on without DDP, each rank by itself."""
    for interrupted, uninterrupted in run_ranks(_fit_with_refused_plan):
        assert_same(interrupted, uninterrupted)


class OwnBuffer(Tiny):
    """Has a buffer of another value on every rank."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += 1 + self.global_rank
        return super().training_step(batch, batch_idx)


def _fit_with_buffers() -> float:
    module = OwnBuffer()
    _fit({"broadcast_buffers": False}, {"broadcast_buffers": False, "comm_hook": "all_reduce"}, module)
    return module.seen.item()


def test_buffers_outlive_a_change() -> None:
    """If it fails, a change of plan gives all ranks the buffers of rank 0, which broadcast_buffers=False forbids."""
    assert run_ranks(_fit_with_buffers) == [6.0, 12.0]


def _change_late() -> CommPlan:
    strategy = CommOptDDP()
    plan = CommPlan(comm_hook=AllReduce())
    trainer(strategy, callbacks=[ChangePlan(plan, within_batch=True)], max_steps=3).fit(Tiny(), loader())
    return strategy.plan


def test_plan_that_arrives_in_the_last_batch_holds_for_the_next_fit() -> None:
    """If it fails, a plan that waits for a next batch is forgotten when there is none."""
    assert run_ranks(_change_late) == [CommPlan(comm_hook=AllReduce())] * 2
