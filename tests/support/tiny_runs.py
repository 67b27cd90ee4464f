"""Overrides of a run of ``commopt-train`` that takes as little as a run can."""

TINY = (
    "model.width=16",
    "model.num_layers=1",
    "data.batch_size=2",
    "trainer.max_steps=4",
    "trainer.limit_val_batches=1",
    "trainer.accelerator=cpu",
    "num_warmup_steps=1",
)
