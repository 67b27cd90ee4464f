"""Compresses and decompresses a bucket of odd size without other ranks, for a tool that watches memory accesses."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_commopt.compressors import Layout
from lightning_commopt.compressors.catalog import ready_compressors
from lightning_commopt.compressors.channel import Channel
from lightning_commopt.sync.warm_up import run_alone

_SHAPES = ((257, 129), (7,), (33, 65), (4097,))


def run_one_bucket(device: torch.device, group: dist.ProcessGroup) -> int:
    """Runs every compressor on a bucket of `_SHAPES`; returns how many there are."""
    layout = Layout.of([torch.empty(shape, device="meta") for shape in _SHAPES], torch.float32)
    compressors = ready_compressors()
    with torch.no_grad():
        for compressor in compressors.values():
            flat = torch.ones(layout.numel, device=device)
            run_alone(compressor, layout, flat, Channel(group))
            assert flat.isfinite().all()
    return len(compressors)


def main() -> None:
    """Runs on the device in the command line, in a group of one rank."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(str(Path(folder) / "store"), 1), rank=0, world_size=1)
        assert dist.group.WORLD is not None
        print(f"{run_one_bucket(torch.device(sys.argv[1]), dist.group.WORLD)} compressors")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
