"""CommTimeMonitor fits the link while it trains: for loggers and callbacks, alike on all ranks, and predictions."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from small_fit import NUM_STEPS, fit

from lightning_commopt import CommOptDDP
from lightning_commopt.callbacks import CommTimeMonitor
from lightning_commopt.callbacks import comm_time as comm_time_module
from lightning_commopt.cost.basis import Basis
from lightning_commopt.measure.link.from_steps import SentStep
from lightning_commopt.measure.record import StepRecord
from lightning_commopt.measure.recorder import StepRecorder
from support.lightnings import Callback, Trainer
from support.ranks import run_ranks
from support.simulated_link import LATENCY_S, S_PER_BYTE, buckets_of_ranks

SIZES = (25_000_000, 1_000_000, 3_000_000)
NAMES = ("comm_time/link_latency_s", "comm_time/link_bandwidth")


class Reader(Callback):
    """Notes whether the link is known whenever a batch ends, and its numbers."""

    def __init__(self) -> None:
        self.is_known: list[bool] = []
        self.metrics: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.metrics = [float(trainer.callback_metrics.get(name, math.nan)) for name in NAMES]
        self.is_known.append(not any(map(math.isnan, self.metrics)))


def trained(folder: str, **options: Any) -> tuple[list[bool], list[float], dict[str, float]]:
    reader = Reader()
    monitor = CommTimeMonitor(every_n_steps=4, num_warmup_steps=2, dirpath=folder, print_summary=False, **options)
    fit(monitor, CommOptDDP(bucket_cap_mb=0.0001), callbacks=[reader])
    return reader.is_known, reader.metrics, monitor.summary


def trained_thrice(folder: str) -> list[Any]:
    class OnSimulatedLink(StepRecorder):
        """Trains as it does, but its buckets took what they take on another link, and took turns on it."""

        def take(self, num_steps: int) -> list[StepRecord]:
            steps = super().take(num_steps)
            rank = comm_time_module.dist.get_rank()
            buckets = [buckets_of_ranks(step.step, SIZES, gap_s=1.0)[rank] for step in steps]
            return [dataclasses.replace(step, buckets=own) for step, own in zip(steps, buckets, strict=True)]

    predicted_from: list[list[list[float]]] = []
    of_steps = Basis.of_steps

    def noting(*args: Any, sent: Sequence[SentStep], **options: Any) -> Basis:
        predicted_from.append([[message.time_s for message in step.buckets] for step in sent])
        return of_steps(*args, sent=sent, **options)

    with patch.object(Basis, "of_steps", noting):
        answers: list[Any] = [trained(f"{folder}/real")]
        comm_time_module.StepRecorder = OnSimulatedLink  # type: ignore[misc]
        answers.append(trained(f"{folder}/simulated"))
        answers.append(trained(f"{folder}/off", fit_link_model=False))
    return [*answers, predicted_from]


def test_the_link_is_refreshed_while_training_and_is_that_of_predictions(tmp_path: Path) -> None:
    """If it fails, ranks log different links, or predictions lean on rank 0 alone, which waits for others."""
    (real, simulated, off, predicted_from), (_, other, *_) = run_ranks(trained_thrice, str(tmp_path))
    is_known, metrics, summary = simulated
    assert is_known == [False] * 7 + [True] * 3  # the first window of four steps arrives with the second
    assert metrics == other[1] == [pytest.approx(LATENCY_S), pytest.approx(1 / S_PER_BYTE)]
    for of_rank in (summary, other[2]):
        assert of_rank["link_latency_s"] == pytest.approx(LATENCY_S)
        assert of_rank["link_bandwidth"] == pytest.approx(1 / S_PER_BYTE)
    assert real[2].keys() == summary.keys()
    assert off[2].keys() == summary.keys() - {"link_latency_s", "link_bandwidth"}
    assert not any(off[0])

    of_real, of_simulated, of_off = predicted_from
    assert len(of_real) == NUM_STEPS
    expected_s = [LATENCY_S + size * S_PER_BYTE for size in SIZES]  # what the last rank to join has seen
    assert of_simulated == [pytest.approx(expected_s)] * NUM_STEPS
    assert of_off == []
