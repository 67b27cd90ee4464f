"""Lossless plans change no number, whatever a training step does."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from cross_section import sampled
from strategy_models import (
    BatchNormed,
    Checkpointed,
    Compiled,
    Embedded,
    FreezeLater,
    Frozen,
    Gan,
    Keeping,
    Manual,
    Params,
    Talking,
    Thaw,
    Thawing,
    Tied,
    Tiny,
    Unused,
    assert_same,
    loader,
    numbers,
    trainer,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt import CommOptDDP
from lightnings import DDPStrategy, LightningModule, MixedPrecision, callbacks
from ranks import run_ranks

_SMALL_MB = 0.001


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to train.

    ``exact``: bitwise equal to Lightning's DDPStrategy with 2 ranks, else to 1e-6; None where DDPStrategy gets it
    wrong. ``joined_rtol``: against one process on the joined batch; None where that computes something else.
    """

    module: Callable[[], LightningModule] = Tiny
    trainer: Callable[[], dict[str, Any]] = dict
    strategy: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    samples: int = 24
    exact: bool | None = True
    joined_rtol: float | None = 1e-5


def _half_precision_plugin() -> list[MixedPrecision]:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    return [MixedPrecision("16-mixed", "cpu", scaler=scaler)]


PLANS: dict[str, dict[str, Any]] = {
    "native": {},
    "small_buckets": {"bucket_cap_mb": _SMALL_MB},
    "all_reduce": {"comm_hook": "all_reduce"},
    "all_reduce_small_buckets": {"comm_hook": "all_reduce", "bucket_cap_mb": _SMALL_MB},
    "view": {"gradient_as_bucket_view": True},
    "view_all_reduce": {"gradient_as_bucket_view": True, "comm_hook": "all_reduce", "bucket_cap_mb": _SMALL_MB},
    "torch_hook": {"ddp_comm_hook": allreduce_hook, "bucket_cap_mb": _SMALL_MB},
    "static": {"static_graph": True},
    "static_all_reduce": {"static_graph": True, "comm_hook": "all_reduce", "bucket_cap_mb": _SMALL_MB},
}
if "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel).parameters:
    PLANS["list_of_buckets"] = {"bucket_cap_mb": [_SMALL_MB, 3 * _SMALL_MB], "comm_hook": "all_reduce"}
_STATIC = ("static", "static_all_reduce")
_SMALL = tuple(name for name, options in PLANS.items() if "bucket_cap_mb" in options)

MODES = {
    "automatic": Mode(),
    "manual": Mode(module=Manual),
    "manual_accumulation": Mode(module=lambda: Manual(accumulate=2), exact=False),
    "gan": Mode(module=Gan, strategy={"find_unused_parameters": True}, without=_STATIC),
    "accumulation_2": Mode(trainer=lambda: {"accumulate_grad_batches": 2}, exact=False),
    "accumulation_3": Mode(trainer=lambda: {"accumulate_grad_batches": 3}, exact=False),
    "accumulation_4": Mode(trainer=lambda: {"accumulate_grad_batches": 4}, samples=56, exact=False),
    "accumulation_uneven": Mode(trainer=lambda: {"accumulate_grad_batches": 2}, samples=40, exact=False),
    "accumulation_scheduled": Mode(
        trainer=lambda: {"callbacks": [callbacks.GradientAccumulationScheduler({0: 2, 1: 3})]}, exact=False
    ),
    "uneven_last_batch": Mode(samples=28),
    "clip_norm": Mode(trainer=lambda: {"gradient_clip_val": 0.1}),
    "clip_value": Mode(trainer=lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "bf16_mixed": Mode(trainer=lambda: {"precision": "bf16-mixed"}, joined_rtol=None),
    "16_mixed": Mode(trainer=lambda: {"plugins": _half_precision_plugin()}, joined_rtol=None),
    "bf16_true": Mode(trainer=lambda: {"precision": "bf16-true"}, joined_rtol=None),
    "64_true": Mode(trainer=lambda: {"precision": "64-true"}, joined_rtol=1e-12),
    "checkpointing": Mode(module=lambda: Checkpointed(use_reentrant=False)),
    "checkpointing_reentrant": Mode(module=lambda: Checkpointed(use_reentrant=True)),
    "batch_norm": Mode(module=BatchNormed, joined_rtol=None),
    "own_collectives": Mode(module=Talking),
    "unused": Mode(module=Unused, strategy={"find_unused_parameters": True}),
    "unused_now_and_then": Mode(
        module=lambda: Unused(now_and_then=True), strategy={"find_unused_parameters": True}, without=_STATIC
    ),
    "frozen": Mode(module=Frozen),
    "unfrozen_in_training": Mode(module=Thawing, trainer=lambda: {"callbacks": [Thaw()]}, exact=None),
    "frozen_in_training": Mode(trainer=lambda: {"callbacks": [FreezeLater()]}, exact=None),
    "tied": Mode(module=Tied),
    "zeroed_in_place": Mode(module=Keeping),
    "compiled": Mode(module=lambda: Compiled("eager"), without=_SMALL),
    "compiled_aot": Mode(module=lambda: Compiled("aot_eager"), without=_SMALL),
    "sparse": Mode(module=Embedded),
    "swa": Mode(
        trainer=lambda: {
            "max_epochs": 3,
            "callbacks": [callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)],
        }
    ),
    "early_stopping": Mode(
        trainer=lambda: {
            "max_epochs": 9,
            "callbacks": [callbacks.EarlyStopping("loss", stopping_threshold=0.5, check_on_train_epoch_end=True)],
        }
    ),
}
if hasattr(callbacks, "WeightAveraging"):
    MODES["ema"] = Mode(trainer=lambda: {"callbacks": [callbacks.EMAWeightAveraging(decay=0.5)]})
# One of each kind: what a step is, what happens between its backward and its update, and what its gradients are.
BY_DEFAULT = frozenset(
    {
        *("automatic", "manual_accumulation", "gan", "accumulation_2", "16_mixed", "checkpointing_reentrant"),
        *("batch_norm", "unused_now_and_then", "unfrozen_in_training", "compiled", "sparse"),
    }
)
# These take every plan; the other modes one without a hook, and a hook in each way that DDP keeps gradients.
WITH_EVERY_PLAN = frozenset({"automatic", "accumulation_2", "checkpointing_reentrant"})
FEW_PLANS = ("native", "all_reduce", "view_all_reduce", "static_all_reduce")
JOINED = [name for name, mode in MODES.items() if mode.joined_rtol is not None]


def _fit(mode: Mode, strategy: Any, batch_size: int = 4) -> Params:
    module = mode.module()
    trainer(strategy, **mode.trainer()).fit(module, loader(mode.samples, batch_size))
    return numbers(module)


def _plans(name: str) -> list[str]:
    return [plan for plan in (PLANS if name in WITH_EVERY_PLAN else FEW_PLANS) if plan not in MODES[name].without]


def _fit_all(name: str) -> dict[str, Params]:
    mode = MODES[name]
    params = {plan: _fit(mode, CommOptDDP(**mode.strategy, **PLANS[plan])) for plan in _plans(name)}
    if mode.exact is not None:
        params["lightning"] = _fit(mode, DDPStrategy(**mode.strategy))
    return params


def _fit_joined(names: list[str]) -> dict[str, Params]:
    return {name: _fit(MODES[name], "auto", batch_size=8) for name in names}


@cache
def _joined(is_default: bool) -> dict[str, Params]:
    return run_ranks(_fit_joined, [name for name in JOINED if (name in BY_DEFAULT) == is_default], world_size=1)[0]


@cache
def _trained(name: str) -> list[dict[str, Params]]:
    return run_ranks(_fit_all, name)


@pytest.mark.parametrize("name", sampled(MODES, BY_DEFAULT))
def test_ranks_agree(name: str) -> None:
    """If it fails, some gradients are not synchronized, and the models of the ranks drift apart."""
    first, second = _trained(name)
    for plan, params in first.items():
        if name == "batch_norm":  # every rank counts its own last batch
            params = {key: values for key, values in params.items() if "running" not in key}
        assert_same({key: second[plan][key] for key in params}, params)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        case
        for name, mode in MODES.items()
        for plan in _plans(name)
        if mode.exact is not None
        for case in sampled([(name, plan)], [(name, plan)] if name in BY_DEFAULT else [])
    ],
)
def test_plan_trains_as_lightnings_ddp(name: str, plan: str) -> None:
    """If it fails, a plan that loses nothing trains another model than DDPStrategy."""
    trained = _trained(name)[0]
    assert_same(trained[plan], trained["lightning"], rtol=0.0 if MODES[name].exact else 1e-6)


@pytest.mark.parametrize("name", sampled(JOINED, BY_DEFAULT.intersection(JOINED)))
def test_ranks_train_as_one_process(name: str) -> None:
    """If it fails, two ranks do not compute the gradient of their joined batch."""
    joined = _joined(name in BY_DEFAULT)[name]
    initial = numbers(MODES[name].module())
    assert any((joined[key] != values).any() for key, values in initial.items())
    for params in _trained(name)[0].values():
        assert_same(params, joined, rtol=MODES[name].joined_rtol or 0.0)
