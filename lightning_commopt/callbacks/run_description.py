"""The part of a record that is known before training: strategy, plan, device, model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy

from lightning_commopt.compressors.registry import compressor_from_config, compressor_name, compressor_to_config
from lightning_commopt.plan import CommPlan
from lightning_commopt.runs.settings import flat
from lightning_commopt.strategy.base import plan_of


def describe(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Returns the fields of the record that are known before the fit."""
    strategy = trainer.strategy
    device = strategy.root_device
    plan = plan_of(strategy)
    return {
        "sync_method": type(strategy).__name__ if plan is None else _sync_method(plan),
        "plan_name": None if plan is None else plan.name,
        "strategy": type(strategy).__name__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "plan": None if plan is None else _plan_options(plan, is_short=True),
        "is_lossy": None if plan is None else plan.comm_hook is not None and plan.comm_hook.is_lossy,
        "world_size": trainer.world_size,
        "num_parameters": sum(parameter.numel() for parameter in module.parameters()),
    }


def plan_settings(strategy: Strategy) -> dict[str, Any]:
    """Returns the options of a strategy's plan, flat, with their defaults; empty where there is no plan."""
    plan = plan_of(strategy)
    return {} if plan is None else flat(_plan_options(plan), "plan.")


def _plan_options(plan: CommPlan, *, is_short: bool = False) -> dict[str, Any]:
    """Returns the options of a plan in types that JSON has; a compressor without a name by its repr.

    Args:
        plan: to be described.
        is_short: without the options of the compressor that have their defaults.
    """
    try:
        options = plan.to_dict()
    except ValueError:
        return {**dataclasses.replace(plan, comm_hook=None).to_dict(), "comm_hook": repr(plan.comm_hook)}
    if is_short and "comm_hook" in options:
        options["comm_hook"] = _without_defaults(options["comm_hook"])
    return options


def _without_defaults(hook: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a compressor's configuration without the options that have their defaults."""
    inner = hook.get("inner")
    short = {**hook, "inner": _without_defaults(inner)} if isinstance(inner, Mapping) else dict(hook)
    needed: dict[str, Any] = {name: short[name] for name in ("name", "inner") if name in short}
    try:
        compressor = compressor_from_config(needed)
        assert compressor is not None
        defaults = compressor_to_config(compressor)
    except (AssertionError, TypeError, ValueError):  # it has options without defaults
        return short
    return {name: value for name, value in short.items() if name in needed or value != defaults.get(name)}


def _sync_method(plan: CommPlan) -> str:
    return "none" if plan.comm_hook is None else compressor_name(plan.comm_hook)
