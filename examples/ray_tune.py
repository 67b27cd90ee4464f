"""Ray Tune searches over plans: pip install 'lightning-commopt[ray]' && python examples/ray_tune.py."""

from pathlib import Path
from typing import Any

import ray.tune
from lightning.pytorch import Trainer, seed_everything
from model import Classifier, Points
from ray.train import RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback

from lightning_commopt.callbacks import CommTimeMonitor
from lightning_commopt.ray import CommOptDDP

STORAGE = str(Path("ray_tune").absolute())


def train(plan: dict[str, Any]) -> None:
    """Trains in a worker. The numbers of CommTimeMonitor reach Ray as those that the model logs do."""
    seed_everything(0)
    trainer = Trainer(
        max_epochs=3,
        strategy=CommOptDDP(**plan),
        plugins=[RayLightningEnvironment()],
        callbacks=[CommTimeMonitor(every_n_steps=10, print_summary=False), RayTrainReportCallback()],
        enable_progress_bar=False,
    )
    prepare_trainer(trainer).fit(Classifier(width=1024), Points())


def trial(plan: dict[str, Any]) -> None:
    """Starts the workers of one trial."""
    run = RunConfig(storage_path=STORAGE, callbacks=[TuneReportCallback()])
    workers = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.9})
    TorchTrainer(train, train_loop_config=plan, scaling_config=workers, run_config=run).fit()


def main() -> None:
    """Runs one trial at a time: two would share the network, and slow each other down."""
    space = {"comm_hook": ray.tune.grid_search([None, "int8"]), "bucket_cap_mb": ray.tune.grid_search([1, 25])}
    config = ray.tune.TuneConfig(metric="comm_time/step_s", mode="min", max_concurrent_trials=1)
    light = ray.tune.with_resources(trial, {"cpu": 0.1})  # it only waits for its workers
    run = ray.tune.RunConfig(storage_path=STORAGE)
    results = ray.tune.Tuner(light, param_space=space, tune_config=config, run_config=run).fit()
    columns = [
        "config/comm_hook",
        "config/bucket_cap_mb",
        "comm_time/step_s",
        "comm_time/exposed_share",
        "val_accuracy",
    ]
    print(results.get_dataframe().sort_values("comm_time/step_s")[columns].to_string(index=False))
    print(f"fastest: CommOptDDP(**{results.get_best_result().config})")


if __name__ == "__main__":
    main()
