"""CommTimeMonitor collects in a fit what predictions need, leaves no hooks behind, and recommends what they show."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from small_fit import PARAMETERS, Net, fit

from lightning_commopt import CommOptDDP
from lightning_commopt.callbacks import CommTimeMonitor, prediction
from lightning_commopt.cost.basis import basis_of_run
from lightning_commopt.measure.clock import HostClock
from lightning_commopt.measure.files import read_run, steps_of_plan
from lightning_commopt.measure.forecasts import read_forecasts
from lightning_commopt.measure.runs.files import PREDICTION_FILE
from lightning_commopt.plan import CommPlan
from support.lightnings import Callback
from support.quick_costs import quick_costs
from support.warm_ranks import run_ranks


class Manual(Net):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


FITS: dict[str, dict[str, Any]] = {
    "plain": {"strategy": {}},
    "int8": {"strategy": {"comm_hook": "int8", "bucket_cap_mb": 0.0001}},
    "stock": {"strategy": "ddp"},
    "accumulating": {"strategy": {}, "accumulate_grad_batches": 3},
    "manual": {"strategy": {}, "net": Manual},
    "torch_hook": {"strategy": "torch"},
    "changing": {"strategy": {}, "max_steps": 15},
    "changing, on a device that lags": {"strategy": {}, "max_steps": 15},
}
_CHANGED_AFTER = 4  # steps


class PlanChanger(Callback):
    """Allows int8 in the middle of a window of three steps, as ``plan="auto"`` may."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == _CHANGED_AFTER:
            trainer.strategy.apply_plan("int8")


def train(folder: str, name: str) -> tuple[int, str]:
    """Returns the number of hooks that are left on parameters, and the verdict."""
    options = dict(FITS[name])
    strategy, net = options.pop("strategy"), options.pop("net", Net)()
    if strategy == "torch":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        strategy = CommOptDDP(ddp_comm_hook=default_hooks.fp16_compress_hook)
    elif strategy != "ddp":
        strategy = CommOptDDP(**strategy)
    monitor = CommTimeMonitor(every_n_steps=3, num_warmup_steps=2, dirpath=f"{folder}/{name}", print_summary=False)
    changer = [PlanChanger()] if name.startswith("changing") else []
    with (
        patch.object(HostClock, "num_lag_steps", 5 if name.endswith("lags") else 0),
        patch.object(prediction.Basis, "of_steps", wraps=prediction.Basis.of_steps) as learn,
    ):
        fit(monitor, strategy, net=net, callbacks=changer, **options)
    for call in learn.call_args_list if changer else ():
        assert all(step.totals.wire_bytes < step.totals.gradient_bytes for step in call.args[1][0])
    hooks = [parameter._post_accumulate_grad_hooks for parameter in net.parameters()]
    assert monitor.verdict is not None
    return sum(map(len, filter(None, hooks))), monitor.verdict.headline


def train_unread(folder: str) -> tuple[int, int]:
    """Returns how often compressors are measured and the link probed in a fit whose predictions nobody can read."""
    with patch.object(prediction, "measure_costs") as measured, patch.object(prediction, "probe_link") as probed:
        fit(CommTimeMonitor(num_warmup_steps=2, dirpath=folder, print_summary=False, save_records=False), CommOptDDP())
        return measured.call_count, probed.call_count


def train_all(folder: str) -> list[tuple[int, str]]:
    return [train(folder, name) for name in FITS]


@pytest.fixture(autouse=True)
def _costs_are_quick() -> Iterator[None]:
    with quick_costs():
        yield


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fits")
    for of_rank in run_ranks(train_all, str(folder)):
        assert [num_hooks for num_hooks, _ in of_rank] == [0] * len(FITS)
    return folder


@pytest.mark.parametrize("name", ["plain", "int8", "stock", "accumulating"])
def test_a_fit_leaves_what_predictions_need(fits: Path, name: str) -> None:
    """If it fails, a run cannot be asked about other plans, or is taken for another one."""
    basis = basis_of_run(fits / name)
    assert basis.workload.is_per_gradient
    assert [one.name for one in basis.workload.gradients][-1].startswith("layers.0")
    assert basis.workload.gradient_bytes == 4 * PARAMETERS
    assert basis.workload.num_ranks == 2
    assert basis.workload.num_batches == (3 if name == "accumulating" else 1)
    assert {None, basis.plan.comm_hook} <= basis.costs.keys()
    expected = FITS[name]["strategy"]
    assert basis.plan == CommPlan(**(expected if isinstance(expected, dict) else {}))
    forecasts = read_forecasts(fits / name)
    assert any("int8" in forecast.setting or name == "int8" for forecast in forecasts)
    assert forecasts[-1].setting == f"Trainer(accumulate_grad_batches={4 * basis.workload.num_batches})"


def test_manual_optimization_is_not_told_of_an_option_that_it_excludes(fits: Path) -> None:
    settings = [forecast.setting for forecast in read_forecasts(fits / "manual")]
    assert not any("Trainer" in setting for setting in settings)
    assert "4 times as many backwards per optimizer step" in settings[-1]


def test_a_run_has_the_shapes_of_its_parameters(fits: Path) -> None:
    """If it fails, a run without `prediction.json` counts every gradient as a float32 vector."""
    (fits / "plain" / PREDICTION_FILE).rename(fits / "moved.json")
    basis = basis_of_run(fits / "plain")
    assert {gradient.shape for gradient in basis.workload.gradients} == {(16, 8), (16,), (4, 16), (4,)}
    assert not basis.workload.is_per_gradient


@pytest.mark.parametrize("name", ["changing", "changing, on a device that lags"])
def test_a_run_with_a_changed_plan_shows_the_last_one(fits: Path, name: str) -> None:
    """If it fails, a killed fit with ``plan="auto"`` is predicted as if its compressed steps had no comm hook."""
    assert basis_of_run(fits / name).plan == CommPlan.from_dict({"comm_hook": "int8"})
    (fits / name / PREDICTION_FILE).unlink()
    assert basis_of_run(fits / name).plan == CommPlan.from_dict({"comm_hook": "int8"})
    ranks = read_run(fits / name)
    assert {(records.header["comm_hook"], records.header["is_lossy"]) for records in ranks} == {("int8", True)}
    steps = steps_of_plan(ranks)
    assert [*steps] == [*range(6, 15)]  # from the first window on that began with it
    assert all(record.totals.wire_bytes < record.totals.gradient_bytes for same in steps.values() for record in same)


def test_predictions_that_nobody_can_read_are_not_made(tmp_path: Path) -> None:
    """If it fails, a fit spends a second on what is thrown away."""
    assert run_ranks(train_unread, str(tmp_path)) == [(0, 0), (0, 0)]


def test_somebody_elses_hook_predicts_nothing(fits: Path) -> None:
    """If it fails, fp16's times are taken for those of an uncompressed average."""
    assert not (fits / "torch_hook" / PREDICTION_FILE).exists()
    assert read_forecasts(fits / "torch_hook") == ()


def train_with_a_bug(folder: str) -> tuple[bool, bool]:
    """Returns whether a fit has a verdict, and a prediction, though predicting raises."""
    monitor = CommTimeMonitor(num_warmup_steps=2, dirpath=folder, print_summary=False)
    with patch.object(prediction, "measure_costs", side_effect=AttributeError("a bug")):
        fit(monitor, CommOptDDP())
    return monitor.verdict is not None, Path(folder, PREDICTION_FILE).exists()


def test_a_bug_in_a_prediction_ends_no_fit(tmp_path: Path) -> None:
    """If it fails, a training of days raises at its end, because something about it could not be predicted."""
    assert run_ranks(train_with_a_bug, str(tmp_path)) == [(True, False)] * 2
