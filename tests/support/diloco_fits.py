"""Short fits with DiLoCo, on which tests put hooks and models that change."""

from pathlib import Path
from typing import Any

from lightning_commopt import CommOptDiLoCo
from support.lightnings import Callback, LightningModule
from support.strategy_models import Params, loader, numbers, trainer

MEANS: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0}


def fit(model: LightningModule, *callbacks: Callback, ckpt_path: Path | None = None, **options: Any) -> Params:
    """Trains for six steps; options of a plan are the strategy's, all others the Trainer's."""
    plan = {name: options.pop(name) for name in (*MEANS, "fragments") if name in options}
    strategy = CommOptDiLoCo(sync_every=options.pop("sync_every", 2), **plan)
    run = trainer(strategy, callbacks=[*callbacks], limit_val_batches=0, **options)
    run.fit(model, loader(), ckpt_path=ckpt_path)
    return numbers(model)
