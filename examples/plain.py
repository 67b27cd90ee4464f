"""A Lightning script that trains on all devices. The two marked lines are all that differs from stock Lightning.

python examples/plain.py
"""

from lightning.pytorch import Trainer, seed_everything
from model import Classifier, Points

from lightning_commopt import CommOptDDP  # new


def main() -> None:
    """Trains and validates."""
    seed_everything(0)
    trainer = Trainer(
        accelerator="auto",
        devices=2,
        max_epochs=3,
        strategy=CommOptDDP(comm_hook="bf16"),  # was: strategy="ddp"
    )
    trainer.fit(Classifier(), Points())


if __name__ == "__main__":
    main()
