"""How much longer arithmetic takes beside all-reduces over gloo that share its core, and what interrupts are found.

Two hosts of the lab, one core each. In turns a thread computes alone, and beside a thread that all-reduces 4.7 MB again
and again. Processor time of the first thread that the second one's packets take is not the link's for the kernel, but
that of whoever is interrupted. Printed are the shares of the core: what the arithmetic takes more, what other threads
of the process take, and interrupts as the prediction counts them, of which the kernel's samples are a part.

python benchmarks/interrupts.py    # two minutes
"""

import argparse
import os
import sys
import threading
import time
from statistics import fmean, median

import torch
import torch.distributed as dist
from torch import nn

from lightning_commopt.cost.gradient_times import interrupts
from lightning_commopt.launch.lab import NetLab

NUM_TURNS = 5
MESSAGE_NUMEL = 9 << 17


class Sender:
    """A thread of this rank that all-reduces in a loop, while it is entered on all ranks."""

    def __enter__(self) -> "Sender":
        self._is_last = False
        self._message = torch.zeros(MESSAGE_NUMEL)
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_last = True
        self._thread.join()

    def _loop(self) -> None:
        while True:
            num_last = torch.tensor(float(self._is_last))
            dist.all_reduce(num_last)
            if num_last.item() > 0:
                return
            dist.all_reduce(self._message)


def work(seconds: float) -> tuple[float, float, float]:
    """Computes; returns the processor time of a convolution, and the shares of other threads and of interrupts."""
    network, image = nn.Conv2d(64, 64, 3, padding=1).requires_grad_(False), torch.randn(4, 64, 28, 28)
    network(image)
    began_s, thread_s, process_s, before_s = time.perf_counter(), time.thread_time(), time.process_time(), interrupts()
    num_calls = 0
    while time.perf_counter() - began_s < seconds:
        network(image)
        num_calls += 1
    wall_s, own_s = time.perf_counter() - began_s, time.thread_time() - thread_s
    others_s = time.process_time() - process_s - own_s
    return own_s / num_calls, others_s / wall_s, (interrupts().seconds - before_s.seconds) / wall_s


def run_rank(seconds: float) -> None:
    """Computes alone and beside messages, in turns; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    alone, beside = [], []
    for _ in range(NUM_TURNS):
        dist.barrier()
        alone.append(work(seconds)[0])
        with Sender():
            beside.append(work(seconds))
    if dist.get_rank() == 0:
        more = 1 - median(alone) / median(call_s for call_s, _, _ in beside)
        others, interrupted = (fmean(row[index] for row in beside) for index in (1, 2))
        print(f"arithmetic {(1 - others) * more:+.1%}, other threads {others:.1%}, interrupts {interrupted:.1%}")
    dist.destroy_process_group()


def main() -> None:
    """Runs two hosts at each rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["100mbit", "300mbit", "1gbit", "2500mbit", "unlimited"])
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(arguments.seconds)
        return
    for rate in arguments.rates:
        with NetLab(2, rate) as lab:
            output = lab.run([sys.executable, __file__, *sys.argv[1:]], pin_to_cores=True, timeout_s=600)[0]
        print(f"{rate}: {output.splitlines()[-1]}", flush=True)


if __name__ == "__main__":
    main()
