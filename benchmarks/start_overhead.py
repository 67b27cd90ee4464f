"""What JoinWatch adds to the start of two ranks that find each other at once, and of two of which one is late.

The same two processes make a process group over and over, in turns with the watch and without it. Printed are the
medians of the seconds from the arrival of the last rank until the group is there, with bootstrap 95 % intervals of the
medians of the paired differences.

python benchmarks/start_overhead.py --num-turns 40
"""

import argparse
import os
import socket
import sys
import time
from contextlib import nullcontext

import numpy as np
import torch.distributed as dist
from results_file import median_with_interval

from lightning_commopt.compat.torch import default_store
from lightning_commopt.testing.ranks import run_ranks
from lightning_commopt.watch.join_watch import JoinWatch


def start_seconds(ports: list[int], late_s: float) -> list[float]:
    """Joins one group a port, every second one under the watch; rank 1 comes ``late_s`` after rank 0.

    Returns:
        Seconds that rank 1 took for each, from its arrival on.
    """
    dist.barrier()
    store, rank = default_store(), int(os.environ["LOCAL_RANK"])
    dist.destroy_process_group()
    seconds = []
    for turn, port in enumerate(ports):
        os.environ["MASTER_PORT"] = str(port)
        store.set(f"{turn}/{rank}", "")
        store.wait([f"{turn}/{other}" for other in range(2)])  # both are here
        if rank == 1:
            time.sleep(late_s)
        begin = time.perf_counter()
        with JoinWatch("127.0.0.1", port, rank=rank, world_size=2, backend="gloo") if turn % 2 else nullcontext():
            dist.init_process_group("gloo", rank=rank, world_size=2)
        seconds.append(time.perf_counter() - begin)
        dist.barrier()
        dist.destroy_process_group()
    return seconds


def free_ports(number: int) -> list[int]:
    """Returns ports that nothing uses."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def main() -> None:
    """Measures both kinds of start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-turns", type=int, default=40)
    parser.add_argument("--late-s", type=float, nargs="*", default=[0.1, 1.5])
    arguments = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    for late_s in arguments.late_s:
        seconds = np.array(run_ranks(start_seconds, free_ports(2 * arguments.num_turns), late_s)[1])
        without, watched = seconds[::2], seconds[1::2]
        added = median_with_interval(list(1e3 * (watched - without)))
        print(
            f"rank 1 late by {late_s:g} s: {1e3 * np.median(without):.2f} ms without, {1e3 * np.median(watched):.2f}"
            f" ms with the watch; added {added['median']:.2f} ms ({added['low_95']:.2f} to {added['high_95']:.2f})"
        )


if __name__ == "__main__":
    main()
