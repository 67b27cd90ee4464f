"""Fits on one rank with ``patience_s``, started by hand, by torchrun or by Lightning; run by ``test_diloco_failures``.

Usage: patient_script.py FOLDER DEVICES NUM_NODES RANK, of which RANK is killed.
"""

import sys
from pathlib import Path

import torch.distributed as dist

from support.patient_trainers import KILLED, Fit, train


def main() -> None:
    folder, devices, num_nodes, rank = sys.argv[1], *map(int, sys.argv[2:])
    job = Fit(Path(folder), {rank: (KILLED, 17)}, pause_s=0.02)
    ended = train(job, lambda rank, step: None, devices=devices, num_nodes=num_nodes)
    total = sum(float(x.sum()) for x in ended.weights.values())
    print(f"RANK {dist.get_rank()} ENDED {ended.steps} {total!r} {ended.metrics['val_loss']!r}", flush=True)


if __name__ == "__main__":
    main()
