"""Trains lightning-hydra-template as it is, with its own ddp and with +commopt=, and compares what comes out.

python benchmarks/hydra_template.py CHECKOUT

CHECKOUT is a clone of https://github.com/ashleve/lightning-hydra-template; it is copied, and not changed. Images in the
format of MNIST are made up in the copy, so that nothing is downloaded. The interpreter needs this package, torchvision,
rootutils and hydra-colorlog. Two ranks on the CPU. Exit status 1 if a plan that loses nothing changes a bit.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from lightning_commopt.measure.runs.record import RunRecord

_CPU_RANKS = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.sync_batchnorm=False")
_SHORT = (
    "callbacks.rich_progress_bar=null",
    "seed=7",
    "trainer.min_epochs=1",
    "trainer.max_epochs=2",
    "data.train_val_test_split=[768,128,128]",
)
_PLANS = {
    "the template's own ddp": (),
    "the same once more": (),
    "+commopt=none": ("+commopt=none",),
    "+commopt=none, all_reduce": ("+commopt=none", "trainer.strategy.comm_hook=all_reduce"),
    "+commopt=buckets": ("+commopt=buckets",),
    "+commopt=powersgd": ("+commopt=powersgd", "trainer.strategy.comm_hook.start_step=2"),
}
_LOSSY = ("+commopt=powersgd",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    checkout = parser.parse_args().checkout
    with tempfile.TemporaryDirectory() as scratch:
        project = Path(scratch) / "project"
        shutil.copytree(checkout, project, ignore=shutil.ignore_patterns(".git"))
        sys.path.insert(0, str(project))  # checkpoints have classes of its folder src
        write_images(project / "data" / "MNIST" / "raw")
        own = train(project, ())
        is_equal = True
        for name, overrides in _PLANS.items():
            weights = train(project, overrides)
            num_different = sum(not torch.equal(weights[key], value) for key, value in own.items())
            print(f"{name:28} {num_different} of {len(own)} tensors differ from the template's own ddp", flush=True)
            is_equal = is_equal and (num_different == 0) == (name not in _LOSSY)
        train(project, ("+commopt=bf16", "+commopt_record=callbacks"), folder="recorded")
        record = RunRecord.load(project / "recorded")
        print(f"+commopt_record=callbacks: run.json says {record.status}, {record.sync_method}")
    sys.exit(0 if is_equal else 1)


def write_images(folder: Path) -> None:
    """Writes 1024 images of noise around one of ten patterns as MNIST's four files, three quarters for training."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    patterns = torch.randint(0, 192, (10, 28, 28), generator=generator)
    for name, number in (("train", 768), ("t10k", 256)):
        labels = torch.randint(0, 10, (number,), generator=generator)
        images = patterns[labels] + torch.randint(0, 64, (number, 28, 28), generator=generator)
        header = struct.pack(">iiii", 0x0803, number, 28, 28)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(header + images.to(torch.uint8).numpy().tobytes())
        header = struct.pack(">ii", 0x0801, number)
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(header + labels.to(torch.uint8).numpy().tobytes())


def train(project: Path, overrides: tuple[str, ...], folder: str = "run") -> dict[str, torch.Tensor]:
    """Trains in a fresh folder, and returns the weights of the last checkpoint."""
    shutil.rmtree(project / folder, ignore_errors=True)
    command = [sys.executable, "src/train.py", *_CPU_RANKS, *_SHORT, *overrides, "test=False"]
    command.append(f"hydra.run.dir={project / folder}")
    ended = subprocess.run(
        command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if ended.returncode:
        sys.exit(f"{ended.stdout}\n{shlex.join(command)} failed")
    checkpoint = torch.load(project / folder / "checkpoints" / "last.ckpt", weights_only=False)
    return checkpoint["state_dict"]


if __name__ == "__main__":
    main()
