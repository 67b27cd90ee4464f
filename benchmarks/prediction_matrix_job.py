"""One rank of `prediction_matrix.py`: fits with one comm hook after another, each with `CommTimeMonitor`."""

import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from batch_model import BatchModel
from lightning.pytorch import Trainer
from torch import nn
from torchvision.models import VisionTransformer

from lightning_commopt import CommOptDDP
from lightning_commopt.callbacks import CommTimeMonitor


def make_model(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Returns a model, a batch for it and its labels."""
    if name == "mlp":  # 1.3 M parameters
        widths = (784, 640, 640, 512, 128, 10)
        layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers[:-1]), torch.randn(64, 784), torch.randint(0, 10, (64,))
    vit = VisionTransformer(image_size=224, patch_size=32, num_layers=4, num_heads=4, hidden_dim=256, mlp_dim=1024)
    return vit, torch.randn(4, 3, 224, 224), torch.randint(0, 1000, (4,))


def main() -> None:
    """Runs the fits that the first argument names, a JSON object."""
    settings = json.loads(sys.argv[1])
    num_local = int(os.environ["LOCAL_WORLD_SIZE"])
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": num_local,
        "num_nodes": int(os.environ["WORLD_SIZE"]) // num_local,
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
        "use_distributed_sampler": False,
        "max_steps": settings["num_steps"],
    }
    for turn in range(settings["num_turns"]):
        for name, hook in settings["hooks"].items():
            folder = Path(settings["folder"]) / f"{name}_{turn}"
            strategy = CommOptDDP(comm_hook=hook)
            torch.manual_seed(0)
            model = BatchModel(*make_model(settings["model"]))
            trainer = Trainer(strategy=strategy, callbacks=[CommTimeMonitor(dirpath=folder)], **options)
            trainer.fit(model, model.loader(settings["num_steps"]))


if __name__ == "__main__":
    main()
