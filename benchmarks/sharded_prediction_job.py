"""One rank of `sharded_prediction.py` and `sharded_rates.py`: fits of a sharded model, each with `CommTimeMonitor`."""

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from batch_model import BatchModel
from lightning.pytorch import Callback, Trainer
from torch import nn

from lightning_commopt import CommOptModelParallel, shard
from lightning_commopt.callbacks import CommTimeMonitor
from lightning_commopt.plan.sharded import ShardedPlan
from lightning_commopt.train.workloads.gpt import Block

NUM_BYTES, CONTEXT = 256, 64


class _Gpt(nn.Module):
    """A byte GPT with four blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_BYTES, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(4)))
        self.head = nn.Linear(width, NUM_BYTES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens))).flatten(0, 1)


def make_model(name: str) -> tuple[nn.Module, type[nn.Module], torch.Tensor, torch.Tensor]:
    """Returns a model, the class of its units, a batch for it and its labels."""
    if name.startswith("mlp"):
        widths = (784, 640, 640, 512, 128, 10) if name == "mlp" else (512,) * 6  # both 1.3 M parameters
        layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers[:-1]), nn.Linear, torch.randn(64, widths[0]), torch.randint(0, 10, (64,))
    if name == "cnn":  # 4.7 M parameters, three quarters of them in the last block
        widths = (3, 32, 64, 128, 256, 512)
        blocks = [_ConvBlock(a, b) for a, b in pairwise(widths)]
        network = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))
        return network, _ConvBlock, torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    width = {"gpt": 128, "gpt_256": 256}[name]  # 0.8 M and 3.3 M parameters
    tokens = torch.randint(0, NUM_BYTES, (8, CONTEXT + 1))
    return _Gpt(width), Block, tokens[:, :-1], tokens[:, 1:]


class _ConvBlock(nn.Sequential):
    def __init__(self, num_in: int, num_out: int) -> None:
        first, second = nn.Conv2d(num_in, num_out, 3, stride=2, padding=1), nn.Conv2d(num_out, num_out, 3, padding=1)
        super().__init__(first, nn.ReLU(), second, nn.ReLU())


class _Model(BatchModel):
    def __init__(self, name: str, replicated: bool) -> None:
        torch.manual_seed(0)
        model, self.block, inputs, labels = make_model(name)
        super().__init__(model, inputs, labels)
        self.replicated = replicated

    def configure_model(self) -> None:
        shard(self, self.device_mesh, blocks=self.block, replicated=self.replicated)


class _Alternate(Callback):
    """Changes the plan every ``num_steps`` steps, one after another, again and again."""

    def __init__(self, plans: list[ShardedPlan], num_steps: int) -> None:
        self._plans, self._num_steps = plans, num_steps

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step % self._num_steps == 0:
            trainer.strategy.apply_plan(self._plans[trainer.global_step // self._num_steps % len(self._plans)])


def main() -> None:
    """Runs the fits that the first argument names, a JSON object."""
    settings = json.loads(sys.argv[1])
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "num_nodes": 2,
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
        "use_distributed_sampler": False,
    }
    folder, plans = Path(settings["folder"]), {name: ShardedPlan(**plan) for name, plan in settings["plans"].items()}

    def fit(name: str, plan: ShardedPlan, num_steps: int, *callbacks: Callback) -> None:
        monitor = CommTimeMonitor(dirpath=folder / name, num_warmup_steps=5)
        strategy = CommOptModelParallel(2, 1, plan=plan)
        trainer = Trainer(strategy=strategy, callbacks=[monitor, *callbacks], max_steps=num_steps, **options)
        model = _Model(settings["model"], settings["replicated"])
        trainer.fit(model, model.loader(num_steps))

    for turn in range(settings["num_turns"]):
        for name in settings["learned_from"]:
            fit(f"{name}_{turn}", plans[name], settings["num_steps"])
        num_steps = settings["num_cycles"] * len(plans) * settings["num_block_steps"]
        first = next(iter(plans.values()))
        if num_steps:
            fit(f"alternating_{turn}", first, num_steps, _Alternate([*plans.values()], settings["num_block_steps"]))


if __name__ == "__main__":
    main()
