"""Trains as a rank of torchrun that goes on from the last checkpoint; one rank fails once. Run by ``test_restarts``.

Usage: restarting_script.py FOLDER KIND MONITOR FAULT RANK

KIND is the package of a Trainer, "fsdp2" or "fabric"; MONITOR is 1 for a HangMonitor; FAULT is what RANK does in epoch
1: ``raise`` or ``kill``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def main() -> None:
    folder, kind, has_monitor, fault, failing_rank = Path(sys.argv[1]), *sys.argv[2:]
    os.environ["LIGHTNING_PACKAGE"] = "lightning.pytorch" if kind in ("fabric", "fsdp2") else kind
    import torch
    from restarted_fits import Sharded, Steady, fit, train_with_fabric, whole_state

    def fail_once(rank: int, epoch: int, index: int) -> None:
        if (rank, epoch, index) != (int(failing_rank), 1, 1) or (folder / "failed").exists():
            return
        (folder / "failed").touch()
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("broken on purpose")

    torch.set_num_threads(1)
    if os.environ["RANK"] == "0":
        with (folder / "attempts").open("a") as attempts:
            attempts.write("x")
    model = Sharded(fail_once) if kind == "fsdp2" else Steady(fail_once)
    num_local = int(os.environ["LOCAL_WORLD_SIZE"])
    num_nodes = int(os.environ["WORLD_SIZE"]) // num_local
    if kind == "fabric":
        train_with_fabric(model, folder, devices=num_local, num_nodes=num_nodes)
    else:
        fit(model, folder, has_monitor=has_monitor == "1", devices=num_local, num_nodes=num_nodes)
    state = whole_state(model)
    if os.environ["RANK"] == "0":
        torch.save(state, folder / "weights.pt")


if __name__ == "__main__":
    main()
