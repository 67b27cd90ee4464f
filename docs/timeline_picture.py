"""Draws some steps of a run's ranks: phases, and the buckets' ways below them.

uv run --with matplotlib python docs/timeline_picture.py RUN_DIR PICTURE.png --first-step 20 --num-steps 2
"""

import argparse
from pathlib import Path

from matplotlib import pyplot
from matplotlib.axes import Axes

from lightning_commopt.measure.files import RankRecords, read_run
from lightning_commopt.measure.record import StepRecord

COLORS = {"data": "plum", "forward": "yellowgreen", "backward": "salmon", "optimizer": "gold", "other": "lightgrey"}
BUCKET, WIRE, WAITING = "lightskyblue", "steelblue", "whitesmoke"


def draw_rank(axes: Axes, records: RankRecords, steps: range) -> None:
    """Draws one rank's steps, in milliseconds from the start of the first."""
    chosen = [record for record in records.steps if record.step in steps]
    origin_s = chosen[0].start_s
    num_buckets = max(len(record.buckets) for record in chosen)
    for record in chosen:
        draw_phases(axes, record, origin_s)
        for row, bucket in enumerate(record.buckets, 1):
            for start_s, end_s, color in (
                (bucket.ready_s, bucket.start_s, WAITING),
                (bucket.start_s, bucket.end_s, BUCKET),
                *((start_s, end_s, WIRE) for start_s, end_s in bucket.wire),
            ):
                draw_bar(axes, start_s - origin_s, end_s - origin_s, row, color)
    axes.set_yticks(range(num_buckets + 1), ["phase", *(f"bucket {index}" for index in range(num_buckets))])
    axes.set_ylim(num_buckets + 0.6, -0.6)
    axes.set_title(f"rank {records.rank}", loc="left", fontsize="medium")


def draw_phases(axes: Axes, record: StepRecord, origin_s: float) -> None:
    """Draws what a step is made of, and what of backward is exposed."""
    for name, start_s, end_s in record.phases:
        draw_bar(axes, start_s - origin_s, end_s - origin_s, 0, COLORS[name])
        if name in ("forward", "backward"):
            axes.text(1e3 * (start_s - origin_s), 0, f" {name}", ha="left", va="center", fontsize="small")
    if record.buckets:
        start_s = max(bucket.ready_s for bucket in record.buckets)
        end_s = max(bucket.end_s for bucket in record.buckets)
        left, width = 1e3 * (start_s - origin_s), 1e3 * (end_s - start_s)
        axes.barh(0, width, left=left, height=0.8, fill=False, hatch="///", lw=0)


def draw_bar(axes: Axes, start_s: float, end_s: float, row: int, color: str) -> None:
    """Draws one stretch."""
    left, width = 1e3 * start_s, 1e3 * (end_s - start_s)
    axes.barh(row, width, left=left, height=0.8, color=color, edgecolor="black", linewidth=0.4)


def main() -> None:
    """Reads the records, and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--first-step", type=int, default=20)
    parser.add_argument("--num-steps", type=int, default=2)
    arguments = parser.parse_args()
    ranks = read_run(arguments.run_dir)
    figure, rows = pyplot.subplots(len(ranks), 1, sharex=True, figsize=(10, 1.6 * len(ranks) + 1.4), squeeze=False)
    steps = range(arguments.first_step, arguments.first_step + arguments.num_steps)
    for axes, records in zip(rows[:, 0], ranks, strict=True):
        draw_rank(axes, records, steps)
    rows[-1, 0].set_xlabel(
        "ms; dark: on the wire, light: being compressed, hatched: exposed, the step waits for the link"
    )
    figure.tight_layout()
    figure.savefig(arguments.picture, dpi=120)


if __name__ == "__main__":
    main()
