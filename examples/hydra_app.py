"""A Hydra project of your own: any plan from the command line, and sweeps over plans and numbers of devices.

python examples/hydra_app.py strategy.comm_hook=bf16
python examples/hydra_app.py -m strategy.comm_hook=none,bf16,powersgd trainer.devices=1,2
python examples/hydra_app.py +commopt=powersgd
"""

import hydra
from hydra.utils import instantiate
from lightning.pytorch import seed_everything
from model import Classifier, Points
from omegaconf import DictConfig


@hydra.main(config_path="hydra_conf", config_name="train", version_base="1.3")
def main(config: DictConfig) -> None:
    """Trains as the configuration says."""
    seed_everything(config.seed)
    trainer = instantiate(config.trainer)
    trainer.fit(Classifier(**config.model), Points(**config.data))
    metrics = trainer.validate(datamodule=Points(**config.data), ckpt_path="best", verbose=False)
    if trainer.is_global_zero:
        plan = getattr(trainer.strategy, "plan", None)
        print(f"{trainer.world_size} ranks, {plan and plan.to_dict()}: {metrics[0]}")


if __name__ == "__main__":
    main()
