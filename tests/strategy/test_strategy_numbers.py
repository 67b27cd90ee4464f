"""Lossless plans change no number, whatever a training step does."""

from functools import cache
from typing import Any

import pytest

from lightning_commopt import CommOptDDP
from support.cross_section import sampled
from support.lightnings import DDPStrategy
from support.ranks import run_ranks
from support.strategy_models import Params, assert_same, loader, numbers, trainer
from support.training_modes import MODES, PLANS, Mode

# One of each kind: what a step is, what happens between its backward and its update, and what its gradients are.
BY_DEFAULT = frozenset(
    {
        *("automatic", "manual_accumulation", "gan", "accumulation_2", "16_mixed", "checkpointing_reentrant"),
        *("batch_norm", "unused_now_and_then", "unfrozen_in_training", "compiled", "sparse"),
    }
)
# These take every plan; the other modes one without a hook, and a hook in each way that DDP keeps gradients.
WITH_EVERY_PLAN = frozenset({"automatic", "accumulation_2"})
FEW_PLANS = ("native", "view_all_reduce", "static_all_reduce")
COMPARED = [name for name in BY_DEFAULT if MODES[name].exact is not None]
JOINED = [name for name, mode in MODES.items() if mode.joined_rtol is not None]


def _fit(mode: Mode, strategy: Any, batch_size: int = 4) -> Params:
    module = mode.module()
    initial = numbers(module)
    trainer(strategy, **mode.trainer()).fit(module, loader(mode.samples, batch_size))
    trained = numbers(module)
    assert any((trained[key] != values).any() for key, values in initial.items())
    return trained


def _plans(name: str) -> list[str]:
    return [plan for plan in (PLANS if name in WITH_EVERY_PLAN else FEW_PLANS) if plan not in MODES[name].without]


def _fit_modes(names: list[str]) -> dict[str, dict[str, Params]]:
    return {name: _fit_plans(name) for name in names}


def _fit_plans(name: str) -> dict[str, Params]:
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
def _all_trained(is_default: bool) -> list[dict[str, dict[str, Params]]]:
    return run_ranks(_fit_modes, [name for name in MODES if (name in BY_DEFAULT) == is_default])


def _trained(name: str) -> list[dict[str, Params]]:
    return [of_rank[name] for of_rank in _all_trained(name in BY_DEFAULT)]


@pytest.mark.parametrize("name", sampled(MODES, BY_DEFAULT))
def test_ranks_agree(name: str) -> None:
    """If it fails, some gradients are not synchronized, and the models of the ranks drift apart."""
    first, second = _trained(name)
    for plan, params in first.items():
        if name == "batch_norm":  # every rank counts its own last batch
            params = {key: values for key, values in params.items() if "running" not in key}
        assert_same({key: second[plan][key] for key in params}, params)


@pytest.mark.parametrize("name", sampled([name for name in MODES if MODES[name].exact is not None], COMPARED))
def test_plans_train_as_lightnings_ddp(name: str) -> None:
    """If it fails, a plan that loses nothing trains another model than DDPStrategy."""
    trained = _trained(name)[0]
    for plan in _plans(name):
        assert_same(trained[plan], trained["lightning"], rtol=0.0 if MODES[name].exact else 1e-6, of=plan)


@pytest.mark.parametrize("name", sampled(JOINED, BY_DEFAULT.intersection(JOINED)))
def test_ranks_train_as_one_process(name: str) -> None:
    """If it fails, two ranks do not compute the gradient of their joined batch."""
    joined = _joined(name in BY_DEFAULT)[name]
    for params in _trained(name)[0].values():
        assert_same(params, joined, rtol=MODES[name].joined_rtol or 0.0)
