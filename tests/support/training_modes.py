"""Ways to train, and the plans that must change no number in any of them."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from support.lightnings import LightningModule, MixedPrecision, callbacks
from support.strategy_models import (
    BatchNormed,
    Checkpointed,
    Compiled,
    Embedded,
    FreezeLater,
    Frozen,
    Gan,
    Keeping,
    Manual,
    Talking,
    Thaw,
    Thawing,
    Tied,
    Tiny,
    Unused,
)

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
STATIC_PLANS = ("static", "static_all_reduce")
_SMALL = tuple(name for name, options in PLANS.items() if "bucket_cap_mb" in options)

MODES = {
    "automatic": Mode(),
    "manual": Mode(module=Manual),
    "manual_accumulation": Mode(module=lambda: Manual(accumulate=2), exact=False),
    "gan": Mode(module=Gan, strategy={"find_unused_parameters": True}, without=STATIC_PLANS),
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
        module=lambda: Unused(now_and_then=True), strategy={"find_unused_parameters": True}, without=STATIC_PLANS
    ),
    "frozen": Mode(module=Frozen),
    "unfrozen_in_training": Mode(module=Thawing, trainer=lambda: {"callbacks": [Thaw()]}, exact=None),
    "frozen_in_training": Mode(trainer=lambda: {"callbacks": [FreezeLater()]}, exact=None),
    "tied": Mode(module=Tied),
    "zeroed_in_place": Mode(module=Keeping),
    "compiled": Mode(module=lambda: Compiled("eager"), without=_SMALL),
    "compiled_aot": Mode(module=lambda: Compiled("aot_eager"), without=_SMALL),
    "sparse": Mode(module=Embedded, exact=None),
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
