"""One rank of `tuning.py`: a fit with plan="auto", then every plan of a grid in the same fit."""

import json
import os
import sys
import time
import warnings
from typing import Any

import torch
from batch_model import BatchModel
from lightning.pytorch import Callback, Trainer
from prediction_job import make_model
from rank_results import print_result

from lightning_commopt import CommOptDDP, CommPlan
from lightning_commopt.cost.buckets import buckets_of
from lightning_commopt.cost.workload import Gradient

CHANGE = "CHANGE THE RATE"
_NUM_SETTLING_STEPS = 2


def _now_s(trainer: Trainer) -> float:
    """Returns the time when the device has done what it was given."""
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class _Stop(Callback):
    """Ends a fit early, and keeps the time of every step; rank 0 requests another rate at a step, if wanted."""

    def __init__(self, at_step: int, change_at_step: int | None) -> None:
        self.at_step, self.change_at_step = at_step, change_at_step
        self.marks: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self.marks.append(_now_s(trainer))
        if trainer.global_step == self.change_at_step and trainer.is_global_zero:
            print(CHANGE, flush=True)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.at_step


class _Grid(Callback):
    """Applies one plan after another, and times its steps; all plans in turns."""

    def __init__(self, plans: list[CommPlan], num_steps: int, num_rounds: int) -> None:
        self._plans, self._num_steps, self._num_rounds = plans, num_steps, num_rounds
        self._step = 0
        self._mark = 0.0
        self.seconds: list[list[float]] = [[] for _ in plans]

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        now = _now_s(trainer)
        turn, place = divmod(self._step, self._num_steps)
        if self._step:
            before, its_place = divmod(self._step - 1, self._num_steps)
            if its_place >= _NUM_SETTLING_STEPS:
                self.seconds[before % len(self._plans)].append(now - self._mark)
        if turn == len(self._plans) * self._num_rounds:
            trainer.should_stop = True
        elif not place:
            assert isinstance(trainer.strategy, CommOptDDP)
            trainer.strategy.apply_plan(self._plans[turn % len(self._plans)])
        self._step += 1
        self._mark = time.perf_counter()


def _fit(model: BatchModel, strategy: CommOptDDP, num_steps: int, callback: Callback, accelerator: str) -> None:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    quiet["use_distributed_sampler"] = False
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    options: dict[str, Any] = {"accelerator": accelerator, "devices": local, "num_nodes": world // local, **quiet}
    Trainer(strategy=strategy, max_steps=num_steps, callbacks=[callback], **options).fit(model, model.loader(num_steps))


def search(settings: dict[str, Any]) -> dict[str, Any]:
    """Lets a fit find its plan, then times every plan of the grid; returns what this rank found."""
    launched, accelerator = dict(os.environ), settings.get("accelerator", "cpu")
    torch.manual_seed(0)
    model = BatchModel(*make_model(settings["model"]))
    tuned = CommOptDDP(plan="auto", lossy=settings["lossy"] or "never")
    stop = _Stop(settings["num_fit_steps"], settings["change_at_step"])
    _fit(model, tuned, settings["num_planned_steps"], stop, accelerator)
    plans = [CommPlan(), tuned.plan]
    plans += [
        CommPlan(comm_hook=hook, bucket_cap_mb=cap)
        for hook in (None, *settings["lossy"])
        for cap in settings["caps_mb"]
        if (hook, cap) != (None, None)
    ]
    os.environ.update(launched)  # Lightning removes its variables after a fit
    grid = _Grid(plans, settings["num_grid_steps"], settings["num_rounds"])
    num_steps = len(plans) * settings["num_grid_steps"] * settings["num_rounds"] + 5
    _fit(model, CommOptDDP(watch=False), num_steps, grid, accelerator)
    named = reversed([*model.named_parameters()])  # about the order in which gradients become ready
    gradients = [Gradient(name, tuple(one.shape), one.element_size(), 0.0) for name, one in named]
    return {
        "found": tuned.auto_plan.describe(),
        "chosen": tuned.plan.to_dict(),
        "fit_steps_s": [after - before for before, after in zip(stop.marks, stop.marks[1:], strict=False)],
        "grid": [
            {
                "plan": plan.to_dict(),
                "name": plan.name,
                "buckets": [len(bucket) for bucket in buckets_of(plan, gradients)],
                "steps_s": [round(one, 5) for one in seconds],
            }
            for plan, seconds in zip(plans, grid.seconds, strict=True)
        ],
    }


def main() -> None:
    """Does what the first argument, a JSON object, describes; rank 0 prints what it found."""
    is_first = os.environ["RANK"] == "0"
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    found = search(json.loads(sys.argv[1]))
    if is_first:
        print_result(found)


if __name__ == "__main__":
    main()
