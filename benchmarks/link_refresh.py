"""What it costs to keep the link of a run up to date: a window of `CommTimeMonitor`, without the training.

Stores no result: prints the median and the longest processor time of 200 windows of 50 steps, in microseconds, for
several numbers of buckets: `rows` of this rank's steps, and `update` with those of all ranks, which is the fit to the
last 200 steps.

python benchmarks/link_refresh.py
"""

import argparse
import random
import time

import numpy as np

from lightning_commopt.measure.link.tracker import LinkTracker
from lightning_commopt.measure.record import BucketSpan, Phase, StepRecord

WINDOW = 50
NUM_RANKS = 2


def steps(num_buckets: int, drawn: random.Random) -> list[StepRecord]:
    """Returns a window of steps, with buckets of different sizes that take turns on a link."""
    records = []
    for step in range(WINDOW):
        buckets, at_s = [], 0.0
        for index in range(num_buckets):
            size_bytes = 1_000_000 * (1 + 3 * index)
            start_s, at_s = at_s, at_s + (1e-3 + size_bytes / 1e9) * drawn.uniform(0.9, 1.3)
            buckets.append(
                BucketSpan(
                    index=index, backward=0, gradient_bytes=size_bytes, wire_bytes=size_bytes, ready_s=start_s,
                    start_s=start_s, end_s=at_s, wire=((start_s, at_s),),
                )
            )  # fmt: skip
        records.append(StepRecord(step=step, num_samples=1, phases=(Phase("backward", 0, 1),), buckets=tuple(buckets)))
    return records


def time_windows(num_buckets: int, num_windows: int) -> np.ndarray:
    """Returns the seconds of each part in each window, ``(num_windows, 2)``."""
    drawn = random.Random(0)
    tracker = LinkTracker(NUM_RANKS)
    seconds = np.zeros((num_windows, 2))
    for window in seconds:
        records = steps(num_buckets, drawn)
        assert all(record.totals.wire_s > 0 for record in records)  # cached, as the monitor needs them anyway
        began_s = time.thread_time()
        own = np.array(tracker.rows(records, "none"))
        described_s = time.thread_time()
        of_ranks = np.stack([own * drawn.uniform(1, 1.2) for _ in range(NUM_RANKS)])
        gathered_s = time.thread_time()
        tracker.update(of_ranks)
        window[:] = described_s - began_s, time.thread_time() - gathered_s
        assert tracker.fit is not None
    return seconds


def main() -> None:
    """Times windows of steps with several numbers of buckets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-windows", type=int, default=200)
    arguments = parser.parse_args()
    for num_buckets in (1, 2, 4, 8, 100):
        seconds = 1e6 * time_windows(num_buckets, arguments.num_windows)
        parts = [
            f"{name} {np.median(of_part):.0f} ({np.max(of_part):.0f})"
            for name, of_part in zip(("rows", "update"), seconds.T, strict=True)
        ]
        print(f"{num_buckets} buckets: {', '.join(parts)} us", flush=True)


if __name__ == "__main__":
    main()
