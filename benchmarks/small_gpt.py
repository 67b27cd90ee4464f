"""The training that the benchmarks of measuring share: a small GPT, and nothing that is not asked for."""

from typing import Any

from lightning.pytorch import Trainer

from lightning_commopt.train.workloads.gpt import GPT, StdlibSources

CONTEXT = 64


def train_gpt(*, num_steps: int, batch_size: int, width: int = 128, num_layers: int = 2, **options: Any) -> None:
    """Trains without validation, checkpoints, logger or output.

    Args:
        num_steps: optimizer steps.
        batch_size: sequences in a batch of one rank.
        width: of the GPT.
        num_layers: of it.
        **options: of the Trainer.
    """
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(max_steps=num_steps, max_epochs=-1, limit_val_batches=0, **{**quiet, **options})
    model = GPT(context=CONTEXT, width=width, num_layers=num_layers)
    trainer.fit(model, StdlibSources(context=CONTEXT, batch_size=batch_size))
