"""Records of every step of a fit, and what has to be true of each."""

from typing import Any

import numpy as np

from lightning_commopt.callbacks.phases import PhaseCallback
from lightning_commopt.measure.clock import HostClock
from lightning_commopt.measure.record import StepRecord
from lightning_commopt.measure.recorder import StepRecorder
from lightning_commopt.sync.ddp.observed import observe, stop_observing
from support.lightnings import LightningModule, Trainer

# Of support.strategy_models.Tiny.
GRADIENT_BYTES = 4 * (6 * 24 + 24 + 24 * 24 + 24 + 24 + 1)


class Watch(PhaseCallback):
    """Records every step."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.recorder = StepRecorder(HostClock())
        observe(trainer.strategy, self.recorder)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        stop_observing(trainer.strategy, self.recorder)

    def records(self) -> list[StepRecord]:
        return self.recorder.take(100)

    def _enter(self, phase: str | None) -> None:
        self.recorder.enter(phase)

    def _end_batch(self, trainer: Trainer, batch: Any, has_stepped: bool) -> None:
        if has_stepped:
            self.recorder.end_step(trainer.global_step - 1, len(batch[0]))


def assert_in_order(record: StepRecord) -> None:
    """Every bucket is ready, starts, is sent and ends within the step, and is waited for in backward."""
    assert record.totals.wire_bytes > 0
    backwards = [phase for phase in record.phases if phase.name == "backward"]
    for bucket in record.buckets:
        times = [bucket.ready_s, bucket.start_s, *np.ravel(bucket.wire), bucket.end_s]
        assert times == sorted(times)
        assert any(phase.start_s <= bucket.ready_s <= bucket.end_s <= phase.end_s for phase in backwards)
    assert 0 < record.totals.exposed_s <= record.totals.backward_s
    assert 0 < record.totals.wire_s <= record.totals.comm_s <= record.totals.backward_s
    assert [phase.name for phase in record.phases].count("optimizer") == 1
