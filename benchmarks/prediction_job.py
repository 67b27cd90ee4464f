"""One rank of `prediction.py`: trains a model under one plan after another, and records every step."""

import json
import math
import os
import sys
import time
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from gpu_models import IMAGE_SIZE, NUM_CLASSES, SIZES, VisionTransformer
from rank_results import print_result
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt import CommPlan
from lightning_commopt.cost.compressor_cost import measure_costs
from lightning_commopt.cost.gradient_times import GradientTimes
from lightning_commopt.measure.clock import HostClock
from lightning_commopt.measure.observer import Observers
from lightning_commopt.measure.recorder import StepRecorder
from lightning_commopt.sync.ddp.attach import attach_bucket_hook, unwrap
from lightning_commopt.sync.ddp.observed import before_backward, observe_all_reduce

_TIMEOUT = timedelta(minutes=10)
_NUM_WARMUP_STEPS = 3
_MIN_STEPS, _MAX_STEPS = 3, 20  # of a turn


def make_model(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Returns a model, a batch for it and its labels."""
    if name == "mlp":
        widths = (784, 768, 768, 768, 768, 10)
        layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers[:-1]), torch.randn(64, 784), torch.randint(0, 10, (64,))
    if name in SIZES:
        labels = torch.randint(0, NUM_CLASSES, (16,))
        return VisionTransformer(**SIZES[name]), torch.randn(16, 3, IMAGE_SIZE, IMAGE_SIZE), labels
    from torchvision import models

    if name == "mobilenet":
        return models.mobilenet_v3_small(), torch.randn(4, 3, 128, 128), torch.randint(0, 1000, (4,))
    vit = models.VisionTransformer(
        image_size=224, patch_size=32, num_layers=4, num_heads=4, hidden_dim=256, mlp_dim=1024
    )
    return vit, torch.randn(4, 3, 224, 224), torch.randint(0, 1000, (4,))


class Training:
    """A model, its optimizer and its recorder, which outlive the wrappers of plans."""

    def __init__(self, name: str) -> None:
        self.model, self.inputs, self.labels = make_model(name)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.recorder = StepRecorder(HostClock())
        self.observers = Observers()
        self.observers.add(self.recorder)

    def step(self, wrapped: nn.Module, number: int, times: GradientTimes) -> None:
        recorder = self.recorder
        recorder.enter("forward")
        times.begin_forward()
        loss = F.cross_entropy(wrapped(self.inputs), self.labels)
        before_backward(wrapped)
        recorder.enter("backward")
        times.begin_backward()
        loss.backward()
        recorder.enter("optimizer")
        self.optimizer.step()
        recorder.enter("other")
        self.optimizer.zero_grad()
        recorder.end_step(number, len(self.inputs))

    def run(self, plan: CommPlan, budget_s: float) -> dict[str, Any]:
        """Trains under a plan for at most 20 steps, and returns what `prediction.py` needs of this rank."""
        wrapped = DistributedDataParallel(self.model, **plan.ddp_kwargs())
        hook = None
        if plan.comm_hook is None:
            observe_all_reduce(wrapped, self.observers)
        else:
            hook = attach_bucket_hook(wrapped, plan.comm_hook, _TIMEOUT, 2**20, 1, self.observers)
        unused = GradientTimes((), torch.device("cpu"))
        for number in range(_NUM_WARMUP_STEPS):
            began = time.perf_counter()
            self.step(wrapped, number, unused)
        seconds = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        num_steps = int(max(_MIN_STEPS, min(_MAX_STEPS, budget_s / seconds.item())))
        self.recorder.take(_NUM_WARMUP_STEPS)
        times = GradientTimes(self.model.named_parameters(), torch.device("cpu"))
        for number in range(num_steps):
            self.step(wrapped, number, times)
        times.close()
        steps = self.recorder.take(num_steps)
        if hook is not None:
            hook.close()
        unwrap(wrapped)
        return {
            "steps": [json.loads(step.to_json()) for step in steps],
            "layout": [[b.index, b.gradient_bytes, b.names, b.is_last] for b in steps[-1].layout.values()],
            "gradients": [list(gradient) for gradient in times.gradients()],
            "comm_cpu_s": times.comm_cpu_s,
            "interrupts": list(times.interrupts),
            "shares_core": times.shares_core,
            "slowdown": times.slowdown,
        }


def main() -> None:
    """Runs all plans of the first argument, a JSON object, and prints what every rank recorded."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    training = Training(settings["model"])
    plans = [CommPlan.from_dict(plan) for plan in settings["plans"]]
    turns: list[list[dict[str, Any]]] = [[] for _ in plans]
    for _ in range(settings["num_turns"]):
        for number, (plan, own) in enumerate(zip(plans, turns, strict=True)):
            is_base = number == settings["base"]  # what is learned from needs as many steps as real runs have
            own.append(training.run(plan, math.inf if is_base else settings["budget_s"] / settings["num_turns"]))
    gradients = GradientTimes(training.model.named_parameters(), torch.device("cpu"))
    gradients.begin_backward()
    F.cross_entropy(training.model(training.inputs), training.labels).backward()
    dist.barrier()
    hooks = dict.fromkeys(plan.comm_hook for plan in plans)
    costs = measure_costs(hooks, gradients.gradients(), torch.device("cpu"), dist.get_world_size())
    runs = [{"plan": plan.to_dict(), "turns": own} for plan, own in zip(plans, turns, strict=True)]
    mine = {"runs": runs, "costs": [cost.to_plain() for cost in costs.values()]}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if os.environ["RANK"] == "0":
        print_result(everyone)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
