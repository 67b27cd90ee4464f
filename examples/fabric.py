"""Fabric: the same options for a training loop of your own, with gradient accumulation.

python examples/fabric.py
"""

from lightning.fabric import Fabric
from model import Classifier, Points
from torch import nn

from lightning_commopt.fabric import CommOptDDP

ACCUMULATE = 2


def main() -> None:
    """Trains for three epochs."""
    strategy = CommOptDDP(comm_hook={"name": "powersgd", "matrix_rank": 2})
    fabric = Fabric(accelerator="auto", devices=2, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(0)
    classifier = Classifier()
    model, optimizer = fabric.setup(classifier.net, classifier.configure_optimizers())
    loader = fabric.setup_dataloaders(Points().train_dataloader())
    for epoch in range(3):
        for index, (x, y) in enumerate(loader):
            is_accumulating = (index + 1) % ACCUMULATE != 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                loss = nn.functional.cross_entropy(model(x), y)
                fabric.backward(loss / ACCUMULATE)
            if not is_accumulating:
                optimizer.step()
                optimizer.zero_grad()
        mean_loss = fabric.all_reduce(loss.detach())
        fabric.print(f"epoch {epoch}: loss {mean_loss:.3f}, {strategy.wire_bytes / 1e6:.2f} MB sent by each rank")


if __name__ == "__main__":
    main()
