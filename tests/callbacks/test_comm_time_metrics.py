"""CommTimeMonitor hands the steps of all ranks to the metrics of a LightningModule."""

from typing import Any

import numpy as np
import pytest
from small_fit import Net, fit

from lightning_commopt.callbacks import CommTimeMonitor
from lightning_commopt.measure.statistics import QUANTITIES, Steps
from lightning_commopt.metrics import ExposedShare, StepStatistics
from support.ranks import run_ranks

NAMES = list(Steps.of(np.empty((1, 0, len(QUANTITIES)))).statistics())


def test_a_module_gets_every_step_of_all_ranks() -> None:
    """If it fails, a window is lost or comes twice on its way to the metrics of a LightningModule."""
    found = run_ranks(fit_with_metrics)
    assert found[0] == found[1]
    metrics, summary, logged = found[0]
    assert metrics == pytest.approx(summary, rel=1e-12, nan_ok=True)
    assert 0 < logged < 1


def fit_with_metrics() -> tuple[dict[str, float], dict[str, float], float]:
    class Measured(Net):
        def __init__(self) -> None:
            super().__init__()
            self.exposed, self.all = ExposedShare(), StepStatistics()

        def on_train_batch_end(self, *args: Any) -> None:
            for steps in monitor.new_steps:
                self.all.update(steps)
                self.exposed.update(steps)
                self.log("exposed", self.exposed, on_step=False, on_epoch=True)

        def on_train_epoch_end(self) -> None:
            shares.append(float(self.exposed.compute()))

        def on_train_end(self) -> None:
            for steps in monitor.new_steps:
                self.all.update(steps)
            logged.append(float(self.trainer.callback_metrics["exposed"]))

    shares: list[float] = []
    logged: list[float] = []
    monitor = CommTimeMonitor(every_n_steps=3, num_warmup_steps=0, save_records=False, print_summary=False)
    net = Measured()
    fit(
        monitor,
        net=net,
        strategy="ddp",
        max_epochs=2,
        max_steps=-1,
        validates=True,
        val_check_interval=4,
        limit_train_batches=11,
    )
    assert logged == [shares[-1]]
    summary = {name: value for name, value in monitor.summary.items() if name in NAMES}
    return net.all.steps.statistics(2), summary, logged[0]
