"""Metrics of a step's communication in a LightningModule, logged and reset with every epoch as any torchmetrics are.

python examples/metrics.py
"""

from typing import Any

from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from model import Classifier, Points
from torchmetrics import MetricCollection

from lightning_commopt.callbacks import CommTimeMonitor
from lightning_commopt.metrics import ExposedShare, StepMetric


class Measured(Classifier):
    """Logs what each epoch's steps spend on communication."""

    def __init__(self) -> None:
        super().__init__()
        self.comm = MetricCollection(
            {
                "exposed": ExposedShare(),
                "step_p95": StepMetric("step_s_p95"),
                "straggler": StepMetric("straggler_rank"),
            }
        )

    def configure_callbacks(self) -> list[Callback]:
        """Brings the callback whose steps the metrics are updated with."""
        self.monitor = CommTimeMonitor(every_n_steps=10, save_records=False)
        return [self.monitor]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Adds the steps that came from all ranks, with most batches none."""
        for steps in self.monitor.new_steps:
            self.comm.update(steps)
            self.log_dict(self.comm, on_step=False, on_epoch=True)


def main() -> None:
    """Trains with Lightning's own strategy."""
    seed_everything(0)
    logger = CSVLogger("metrics", name="", version="csv")
    trainer = Trainer(accelerator="auto", devices=2, max_epochs=3, strategy="ddp", logger=logger)
    trainer.fit(Measured(), Points())
    if trainer.is_global_zero:
        print({name: round(float(trainer.callback_metrics[name]), 4) for name in ("exposed", "step_p95", "straggler")})


if __name__ == "__main__":
    main()
