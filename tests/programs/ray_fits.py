"""Trains in workers of a Ray cluster on this machine; run by ``test_ray_train`` and ``test_ray_failures``.

Usage: ray_fits.py SCENARIO FOLDER

SCENARIO is "elastic", or a function of this module whose name begins with ``run_``, without that.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import lightning_commopt
from lightning_commopt.callbacks import CommTimeMonitor, HangMonitor
from lightning_commopt.ray import CommOptDDP, CommOptModelParallel
from support import strategy_models
from support.lightnings import Callback, LightningModule, MisconfigurationException, Trainer
from support.strategy_models import Params, Steady, numbers

FAULTS = {1: ("kill", 1), 2: ("kill", 0), 3: ("raise", 1), 4: ("hang", 1)}
"""By epoch: what happens once, and to which rank."""
STRATEGIES: dict[str, Callable[[], Any]] = {
    "ray": RayDDPStrategy,
    "ours": CommOptDDP,
    "all_reduce": lambda: CommOptDDP(comm_hook="all_reduce"),
    "static": lambda: CommOptDDP(static_graph=True, gradient_as_bucket_view=True, bucket_cap_mb=0.001),
    "int8": lambda: CommOptDDP(comm_hook="int8"),
    "powersgd": lambda: CommOptDDP(comm_hook={"name": "powersgd", "start_step": 2}),
}


class Sharded(Steady):
    """One unit of FSDP2 over all ranks."""

    def configure_model(self) -> None:
        if not isinstance(self, FSDPModule):
            assert self.device_mesh is not None
            fully_shard(self, mesh=self.device_mesh["data_parallel"])


JOBS: dict[str, tuple[type[Steady], Callable[[], Any]]] = {
    "int8": (Steady, lambda: CommOptDDP(comm_hook="int8")),
    "sharded": (Sharded, lambda: CommOptModelParallel(2, 1, accumulate_grads="unsharded")),
}
"""What `run_faults` trains, and with which strategy."""


def whole_numbers(model: Steady) -> Params:
    """Returns the parameters, gathered where they are sharded."""
    state = model.state_dict().items()
    whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in state}
    return {name: each.double().numpy() for name, each in whole.items()}


def trainer(strategy: Any, *callbacks: Callback, **options: Any) -> Trainer:
    """Returns a trainer for this worker, as Ray's documentation makes it."""
    return prepare_trainer(
        strategy_models.trainer(
            strategy,
            plugins=[RayLightningEnvironment()],
            devices="auto",
            callbacks=list(callbacks),
            **options,
        )
    )


def run_on_workers(
    train: Callable[[dict[str, Any]], None],
    folder: Path,
    config: dict[str, Any] | None = None,
    num_workers: Any = 2,
    **options: Any,
) -> Any:
    """Runs a function in workers; ``folder`` is in what they get, and where Ray keeps checkpoints."""
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), **(config or {})},
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(name="run", storage_path=str(folder / "storage"), **options),
    )
    return trainer.fit()


def save(folder: str, name: str, value: Any) -> None:
    """Leaves something of this rank for the test."""
    torch.save(value, Path(folder) / f"{name}-{ray.train.get_context().get_world_rank()}.pt")


def train_all(config: dict[str, Any]) -> None:
    """Trains with every strategy, one after another."""
    torch.set_num_threads(1)
    for name, make in STRATEGIES.items():
        model, strategy = Steady(), make()
        comm_time = CommTimeMonitor(dirpath=Path(config["folder"]) / name, num_warmup_steps=1)
        trainer(strategy, comm_time, HangMonitor(dirpath=config["folder"])).fit(model)
        trained = {"parameters": numbers(model), "summary": comm_time.summary}
        save(config["folder"], name, trained | {"num_processes": strategy.num_processes})


def run_all(folder: Path) -> None:
    """Two workers train with every strategy."""
    run_on_workers(train_all, folder)


def train_and_report(config: dict[str, Any]) -> None:
    """Trains from the last checkpoint that was reported to Ray; in each epoch of `FAULTS` a worker fails once."""
    torch.set_num_threads(1)
    folder = Path(config["folder"])

    def fail_once(rank: int, epoch: int, index: int) -> None:
        fault, failing_rank = FAULTS.get(epoch, ("", -1))
        if index != 1 or not fault or (folder / f"failed-{epoch}").exists():
            return
        while num_known_checkpoints(folder) < epoch:  # Ray's controller looks for reports every two seconds
            time.sleep(0.1)
        if rank != failing_rank:
            return
        (folder / f"failed-{epoch}").touch()
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hang":
            time.sleep(600)  # HangMonitor ends both workers
        raise ArithmeticError("broken on purpose")

    make_model, make_strategy = JOBS[config["job"]]
    model = make_model(fail_once)
    monitor = HangMonitor(after_s=2, action="abort", dirpath=folder)
    run = trainer(
        make_strategy(),
        *(CommTimeMonitor(dirpath=folder), monitor, RayTrainReportCallback(), NoteStart(folder)),
        max_epochs=6,
        accumulate_grad_batches=config["num_accumulated"],
    )
    fit_on(run, model)
    save(config["folder"], "trained", whole_numbers(model))


class NoteStart(Callback):
    """Notes the epochs in which fits begin, in a file of the folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "starts"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            with self.path.open("a") as starts:
                starts.write(f"{trainer.current_epoch} ")


def num_known_checkpoints(folder: Path) -> int:
    """Returns how many checkpoints Ray would find after a failure."""
    states = folder.glob("storage/run/checkpoint_manager*")
    return max((len(set(re.findall(r'"(checkpoint_[\w.-]*\d)"', state.read_text()))) for state in states), default=0)


def fit_on(run: Trainer, model: Steady) -> bool:
    """Trains, from the last checkpoint of a restarted job; returns whether there was one."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        run.fit(model)
        return False
    with checkpoint.as_directory() as saved:
        run.fit(model, ckpt_path=Path(saved) / RayTrainReportCallback.CHECKPOINT_NAME)
    return True


def run_faults(folder: Path) -> None:
    """A job of two workers, of which one fails in one epoch after another; the folder has the name of the job."""
    config = {"job": folder.name, "num_accumulated": 2 if folder.name == "sharded" else 1}
    result = run_on_workers(train_and_report, folder, config, failure_config=FailureConfig(max_failures=len(FAULTS)))
    torch.save(dict(result.metrics), folder / "metrics.pt")


def train_wrongly(config: dict[str, Any]) -> None:
    """Trains alone, after trying what cannot work."""
    messages = []
    environment = RayLightningEnvironment()
    cases = [
        *((cls(), [environment]) for cls in (lightning_commopt.CommOptDDP, lightning_commopt.CommOptModelParallel)),
        *((cls(), []) for cls in (CommOptDDP, CommOptModelParallel)),
    ]
    for strategy, plugins in cases:
        try:
            strategy_models.trainer(strategy, plugins=plugins, devices="auto")
        except MisconfigurationException as error:
            messages.append(str(error))
    trainer(CommOptDDP(comm_hook="int8")).fit(Steady())
    save(config["folder"], "messages", messages)


def run_wrongly(folder: Path) -> None:
    """A single worker."""
    run_on_workers(train_wrongly, folder, num_workers=1)


def train_with_fewer(config: dict[str, Any]) -> None:
    """Trains in as many workers as there are; the last node goes in epoch 1."""
    torch.set_num_threads(1)
    folder, context = Path(config["folder"]), ray.train.get_context()
    num_workers = context.get_world_size()

    def wait_for_end(rank: int, epoch: int, index: int) -> None:
        if (num_workers, epoch, index) == (3, 1, 1):
            (folder / "go").touch()
            time.sleep(600)  # the workers end when a node has gone

    model = Steady(wait_for_end)
    run = trainer(CommOptDDP(comm_hook="int8"), RayTrainReportCallback(), max_epochs=3)
    was_resumed = fit_on(run, model)
    save(config["folder"], f"of-{num_workers}", {"parameters": numbers(model), "was_resumed": was_resumed})


def train_sharded(config: dict[str, Any]) -> None:
    """Trains, and again from the checkpoint; then each worker saves at a path of its own."""
    torch.set_num_threads(1)
    for max_epochs in (1, 2):
        run = trainer(CommOptModelParallel(2, 1), RayTrainReportCallback(), max_epochs=max_epochs)
        was_resumed = fit_on(run, model := Sharded())
        save(config["folder"], f"epochs-{max_epochs}", (was_resumed, whole_numbers(model)))
    run.save_checkpoint(Path(config["folder"]) / f"own-{run.global_rank}.ckpt")


def run_shards(folder: Path) -> None:
    """Two workers, each with a half of the parameters."""
    run_on_workers(train_sharded, folder)


def elastic(folder: Path) -> None:
    """Three nodes of one worker each, of which one goes."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        leaving = cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address)

        def remove_node() -> None:
            while not ((folder / "go").exists() and num_known_checkpoints(folder)):
                time.sleep(0.1)
            cluster.remove_node(leaving, allow_graceful=False)

        threading.Thread(target=remove_node, daemon=True).start()
        run_on_workers(train_with_fewer, folder, num_workers=(2, 3), failure_config=FailureConfig(max_failures=1))
    finally:
        ray.shutdown()
        cluster.shutdown()


def main() -> None:
    scenario, folder = sys.argv[1], Path(sys.argv[2])
    if scenario == "elastic":
        elastic(folder)
        return
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as short:  # of paths to sockets
        ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100 * 2**20, _temp_dir=short)
        try:
            globals()[f"run_{scenario}"](folder)
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
