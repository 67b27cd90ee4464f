"""Two nodes under torchrun. Start the same command on both, with --node-rank 0 on the first and 1 on the second.

torchrun --nnodes 2 --nproc-per-node 1 --node-rank 0 --master-addr FIRST_NODE --master-port 29500 examples/two_nodes.py
"""

import os

from lightning.pytorch import Trainer, seed_everything
from model import Classifier, Points

from lightning_commopt import CommOptDDP


def main() -> None:
    """Trains with low-rank gradients: the link between nodes is the slow one."""
    seed_everything(0)
    trainer = Trainer(
        accelerator="auto",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_epochs=3,
        strategy=CommOptDDP(comm_hook={"name": "powersgd", "matrix_rank": 2, "start_step": 50}),
    )
    trainer.fit(Classifier(), Points())
    trainer.validate(datamodule=Points(), verbose=False)
    if trainer.is_global_zero:
        print(f"{trainer.world_size} ranks, accuracy {trainer.callback_metrics['val_accuracy']:.3f}")


if __name__ == "__main__":
    main()
