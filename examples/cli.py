"""LightningCLI: the plan from the command line or from YAML.

python examples/cli.py fit --trainer.strategy lightning_commopt.CommOptDDP --trainer.strategy.comm_hook bf16
python examples/cli.py fit --config examples/cli.yaml
"""

from lightning.pytorch.cli import LightningCLI
from model import Classifier, Points


def main() -> None:
    """Runs the command line."""
    LightningCLI(Classifier, Points, seed_everything_default=0, save_config_kwargs={"overwrite": True})


if __name__ == "__main__":
    main()
