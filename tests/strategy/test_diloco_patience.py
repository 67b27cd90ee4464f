"""CommOptDiLoCo with ``patience_s`` where no rank fails, and its option; ``test_diloco_failures`` has those that do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_commopt import CommOptDiLoCo
from lightning_commopt.plan import DiLoCoPlan, OptionError
from lightning_commopt.sync.diloco.patient import PatientExchange
from support.ranks import run_ranks
from support.strategy_models import BatchNormed, Params, assert_same, loader, numbers, trainer

_SAMPLES = 3 * 4 * 24
_PLAN: dict[str, Any] = {"sync_every": 4, "fragments": 2}
_HIERARCHICAL = {"name": "hierarchical", "inner": "int8"}


def _train(model: BatchNormed, **options: Any) -> tuple[Params, bool]:
    strategy = CommOptDiLoCo(**_PLAN, **options)
    is_patient: list[bool] = []

    fit = trainer(strategy, max_epochs=3)
    original = strategy._make_exchange

    def make() -> Any:
        exchange = original()
        is_patient.append(isinstance(exchange, PatientExchange))
        return exchange

    strategy._make_exchange = make  # type: ignore[method-assign]
    data = loader(_SAMPLES)
    fit.fit(model, data, data)
    return numbers(model), is_patient == [True]


def _calm(patience_s: float | None) -> tuple[Params, bool]:
    return _train(BatchNormed(), patience_s=patience_s)


@pytest.mark.exhaustive
def test_patience_changes_no_bit_of_a_healthy_fit() -> None:
    plain, patient = run_ranks(_calm, None), run_ranks(_calm, 120.0)
    assert [is_patient for _, is_patient in (*plain, *patient)] == [False, False, True, True]
    for weights, _ in (*plain, *patient):
        assert_same(weights, plain[0][0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patience_s": 0}, "patience_s must be a number of seconds above 0 or None, got 0"),
        ({"patience_s": "long"}, "patience_s must be a number of seconds above 0 or None, got 'long'"),
        ({"patience_s": 3, "inner": "ddp"}, "patience_s is not possible with inner"),
        ({"patience_s": 3, "sigterm_every_n_steps": 5}, "patience_s and sigterm_every_n_steps exclude each other"),
        ({"patience_s": 3, "comm_hook": _HIERARCHICAL}, "patience_s is not possible with comm_hook='hierarchical'"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        CommOptDiLoCo(**options)


def test_a_plan_that_needs_all_ranks_of_a_node_is_refused(tmp_path: Path) -> None:
    """If it fails, plans with such a comm_hook are refused only once all ranks of a fit have joined."""
    plan = DiLoCoPlan(comm_hook={"name": "by_size", "min_numel": 2, "inner": _HIERARCHICAL})  # type: ignore[arg-type]
    plan.save(tmp_path / "plan.json")
    for given in (plan, tmp_path / "plan.json"):
        with pytest.raises(OptionError, match="patience_s is not possible with comm_hook='hierarchical'"):
            CommOptDiLoCo(plan=given, patience_s=3)
