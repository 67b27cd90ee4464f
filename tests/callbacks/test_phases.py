import warnings

import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_commopt.callbacks.phases import PhaseCallback
from support.lightnings import LightningModule, Trainer


class Phases(PhaseCallback):
    def __init__(self) -> None:
        self.entered: list[str | None] = []

    def _enter(self, phase):
        self.entered.append(phase)


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).sum()

    def validation_step(self, batch, batch_idx):
        return None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_only_a_fit_waits_for_batches():
    phases = Phases()
    loader = DataLoader(TensorDataset(torch.ones(4, 3)), batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            callbacks=[phases],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            max_epochs=1,
        )
        trainer.fit(Line(), loader, loader)
        step = ["data", "forward", "backward", "other", "optimizer", "other", "data"]
        # The sanity check, a step, a validation, the ends of the epoch and of the fit.
        assert phases.entered == [None, *step, None, "data", None, None]
        phases.entered.clear()
        trainer.validate(Line(), loader, verbose=False)
    assert set(phases.entered) <= {None}
