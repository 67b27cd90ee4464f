"""Processor time of a small collective over gloo: an all-reduce, and the direct exchange of our `Channel`.

Ranks share the cores of this machine, one after another. A pause after each collective lets its threads fall asleep, as
they do between the buckets of a step. Printed are the processor time of rank 0 and the time of a collective.

python benchmarks/collective_cpu.py    # half a minute
"""

import argparse
import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from lightning_commopt.compressors.channel import Channel

NUM_BYTES = 4096
PAUSE_S = 0.004


def run_rank(num_collectives: int) -> None:
    """Times both on this rank; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cores = sorted(os.sched_getaffinity(0))
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    assert dist.group.WORLD is not None
    channel = Channel(dist.group.WORLD)
    message = torch.zeros(num_ranks, NUM_BYTES // 4 // num_ranks)
    for name, start in (("all-reduce", channel.all_reduce), ("exchange", channel.all_to_all)):
        for _ in range(10):
            start(message).wait()
        dist.barrier()
        began, cpu_began = time.perf_counter(), time.process_time()
        for _ in range(num_collectives):
            start(message).wait()
            time.sleep(PAUSE_S)
        cpu_s = (time.process_time() - cpu_began) / num_collectives
        wall_s = (time.perf_counter() - began) / num_collectives - PAUSE_S
        dist.barrier()
        if rank == 0:
            print(f"{num_ranks} ranks, {name}: {1e3 * cpu_s:.2f} ms of processor, {1e3 * wall_s:.2f} ms", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Runs each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-ranks", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--num-collectives", type=int, default=300)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(arguments.num_collectives)
        return
    for num_ranks in arguments.num_ranks:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        subprocess.run([sys.executable, *launcher, __file__, *sys.argv[1:]], check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
