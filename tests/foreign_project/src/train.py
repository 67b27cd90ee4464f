"""Trains as many Hydra + Lightning projects do, and writes down on rank 0 how it was done.

Nothing in here knows of communication plans: the record has what the strategy of the day shows.
"""

import json
import sys
from pathlib import Path

import hydra
import lightning
import torch
from omegaconf import DictConfig, OmegaConf

sys.path.insert(0, str(Path(__file__).parents[1]))


@hydra.main(version_base="1.3", config_path="../configs", config_name="train.yaml")
def main(cfg: DictConfig) -> None:
    """Builds everything from the config and trains."""
    lightning.seed_everything(cfg.seed, workers=True)
    datamodule = hydra.utils.instantiate(cfg.data)
    model = hydra.utils.instantiate(cfg.model)
    trainer = hydra.utils.instantiate(cfg.trainer)
    trainer.fit(model, datamodule=datamodule)
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    if trainer.world_size > 1:
        flats = list(trainer.strategy.all_gather(flat))
        same_on_all_ranks = all(torch.equal(other, flats[0]) for other in flats)
    else:
        same_on_all_ranks = True
    if trainer.is_global_zero:
        plan = getattr(trainer.strategy, "plan", None)
        record = {
            "strategy": f"{type(trainer.strategy).__module__}.{type(trainer.strategy).__qualname__}",
            "package_file": getattr(sys.modules.get("lightning_commopt"), "__file__", None),
            "plan": None if plan is None else json.loads(plan.to_json()),
            "world_size": trainer.world_size,
            "steps": trainer.global_step,
            "finite": bool(torch.isfinite(flat).all()),
            "same_on_all_ranks": same_on_all_ranks,
            "trainer": OmegaConf.to_container(cfg.trainer, resolve=True),
        }
        (Path(trainer.default_root_dir) / "record.json").write_text(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
