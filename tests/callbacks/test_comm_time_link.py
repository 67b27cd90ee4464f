"""CommTimeMonitor fits a link model while it trains: in loggers, alike on all ranks, and in the run's directory."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from small_fit import NUM_STEPS, fit

from lightning_commopt import CommOptDDP
from lightning_commopt.callbacks import CommTimeMonitor
from lightning_commopt.callbacks import comm_time as comm_time_module
from lightning_commopt.measure.link.from_steps import result_of_run
from lightning_commopt.measure.link.model import LinkModel
from lightning_commopt.measure.record import StepRecord
from lightning_commopt.measure.recorder import StepRecorder
from lightning_commopt.measure.runs.files import LINK_MODEL_FILE
from support.lightnings import Callback, Trainer
from support.ranks import run_ranks
from support.simulated_link import LATENCY_S, S_PER_BYTE, buckets_of_ranks

SIZES = (25_000_000, 1_000_000, 3_000_000)
NAMES = ("comm_time/link_latency_s", "comm_time/link_bandwidth")


class Reader(Callback):
    """Notes of which step the file's model is whenever a batch ends, and the metrics."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder) / LINK_MODEL_FILE
        self.last_steps: list[int | None] = []
        self.metrics: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        model = LinkModel.load(self.path) if trainer.is_global_zero and self.path.exists() else None
        self.last_steps.append(None if model is None else model.where["last_step"])
        self.metrics = [float(trainer.callback_metrics.get(name, math.nan)) for name in NAMES]


def trained(folder: str, **options: Any) -> tuple[list[int | None], list[float], dict[str, float]]:
    reader = Reader(folder)
    monitor = CommTimeMonitor(every_n_steps=4, num_warmup_steps=2, dirpath=folder, print_summary=False, **options)
    fit(monitor, CommOptDDP(bucket_cap_mb=0.0001), callbacks=[reader])
    return reader.last_steps, reader.metrics, monitor.summary


def trained_thrice(folder: str) -> list[Any]:
    class OnSimulatedLink(StepRecorder):
        """Trains as it does, but its buckets took what they take on another link."""

        def take(self, num_steps: int) -> list[StepRecord]:
            steps = super().take(num_steps)
            rank = comm_time_module.dist.get_rank()
            buckets = [buckets_of_ranks(step.step, SIZES)[rank] for step in steps]
            return [dataclasses.replace(step, buckets=own) for step, own in zip(steps, buckets, strict=True)]

    answers = [trained(f"{folder}/real")]
    comm_time_module.StepRecorder = OnSimulatedLink  # type: ignore[misc]
    answers.append(trained(f"{folder}/simulated"))
    return [*answers, trained(f"{folder}/off", fit_link_model=False)]


def test_the_model_is_refreshed_while_training_and_is_that_of_the_files(tmp_path: Path) -> None:
    """If it fails, ranks log different models, or the file is not what ``commopt bench --from-run`` would say."""
    (real, simulated, off), (_, other, _) = run_ranks(trained_thrice, str(tmp_path))
    last_steps, metrics, summary = simulated
    assert last_steps == [None] * 7 + [3, 3, 7]
    assert metrics == other[1] == [pytest.approx(LATENCY_S), pytest.approx(1 / S_PER_BYTE)]
    for of_rank in (summary, other[2]):
        assert of_rank["link_latency_s"] == pytest.approx(LATENCY_S)
        assert of_rank["link_bandwidth"] == pytest.approx(1 / S_PER_BYTE)
    assert real[2].keys() == summary.keys()

    for name in ("real", "simulated"):
        model = LinkModel.load(tmp_path / name / LINK_MODEL_FILE)
        of_files = LinkModel.fit(result_of_run(tmp_path / name))
        assert model.where == of_files.where
        assert (model.where["run"], model.where["last_step"]) == (name, NUM_STEPS - 1)
        (curve,), (of_file,) = model.curves, of_files.curves
        assert curve.case == of_file.case
        assert len(curve.spreads) > 1
        for size_bytes, *_ in curve.spreads:  # files have a tenth of a microsecond
            assert curve.predict(size_bytes).time_s == pytest.approx(of_file.predict(size_bytes).time_s, rel=0.02)

    assert set(off[0]) == {None}
    assert not (tmp_path / "off" / LINK_MODEL_FILE).exists()
    assert off[2].keys() == summary.keys() - {"link_latency_s", "link_bandwidth"}
