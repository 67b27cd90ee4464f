"""What communication costs in an existing project: three callbacks, and nothing else changes.

python examples/measure.py
commopt trace measured            # a timeline of every rank, for https://ui.perfetto.dev
"""

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from model import Classifier, Points

from lightning_commopt.callbacks import CommTimeMonitor, CUDAProfilerWindow, NVTXRanges


def main() -> None:
    """Trains with Lightning's own strategy, and prints where the time of a step goes."""
    seed_everything(0)
    trainer = Trainer(
        accelerator="auto",
        devices=2,
        max_epochs=3,
        strategy="ddp",
        logger=CSVLogger("measured", name="", version="csv"),
        callbacks=[
            CommTimeMonitor(every_n_steps=10, dirpath="measured"),
            NVTXRanges(),
            CUDAProfilerWindow(start_step=50, num_steps=3),
        ],
    )
    trainer.fit(Classifier(width=1024), Points())


if __name__ == "__main__":
    main()
