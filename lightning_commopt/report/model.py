"""The data of a report, which terminal, JSON, CSV and page show."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_commopt.measure.runs.losses import LossPoint
from lightning_commopt.measure.runs.record import RunRecord, Tuning

Difference = Literal["faster", "slower", "no difference", "unknown"]
"""From the baseline's throughput; unknown with a single run, or too few to separate it from noise."""

_LIMIT_TOLERANCE = 0.1


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that has ended."""

    folder: Path
    record: RunRecord
    repetition: int = 0  # counted from 0 among the runs of a setting
    losses: tuple[LossPoint, ...] = ()  # the curve; may be empty
    name: str = ""  # of the directory, relative to ``root``, the one that the user named
    root: Path = Path()
    group: str = ""
    setting: str = ""  # name of its setting; a failed run may be the only one of its name
    has_steps: bool = True  # its steps are recorded, and few enough to be read in seconds
    tuning: Tuning | None = None  # what ``plan="auto"`` has found; None without it

    @property
    def settings(self) -> Mapping[str, Any]:
        """The resolved configuration: dotted names to values."""
        return self.record.settings

    @property
    def throughput(self) -> float | None:
        """Samples per second over all ranks; None without a positive finite number."""
        rate = self.record.samples_per_s
        return rate if rate is not None and math.isfinite(rate) and rate > 0 else None


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The median of a number over repetitions, and its 95 % interval, which is the range of less than six values.

    The ends are None with a single value, and for the base of ratios.
    """

    median: float
    low: float | None
    high: float | None
    num_values: int


@dataclass(frozen=True, kw_only=True)
class Published:
    """A figure of others to compare with, such as "8.91 steps/s on 8x L40S (PCIe)", and its publication."""

    label: str
    source: str
    speedup: float | None = None  # over the same baseline as ours; None for other figures


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Runs that differ only in repetition and seed."""

    name: str  # short, and unique in its group: "bf16, 100 MB buckets, 4 ranks"
    values: Mapping[str, str]  # that the sweep varied, by name
    sync_method: str  # see `RunRecord`
    world_size: int
    bucket_cap_mb: float | None  # MiB in a bucket; None for DDP's default or several sizes
    config_lines: tuple[str, ...]  # YAML to paste, which makes `commopt-train`, or ``CommOptDDP``, do the same
    runs: tuple[Run, ...]  # the finished ones, by repetition
    samples_per_s: Interval | None  # over all ranks; settings are compared by it
    steps_per_s: Interval | None
    speedup: Interval | None = None  # of samples_per_s over the baseline, in pairs; None for the baseline itself
    difference: Difference | None = None  # of `speedup` from 1, beyond noise; None for the baseline itself
    # the speed-up if all communication of the baseline were hidden; None if not measured, or the setting differs in
    # more than the plan
    speedup_limit: float | None = None
    efficiency: float | None = None  # speed-up over one rank, divided by the ranks; None without one rank
    step_s: Interval | None  # duration of a step, as all of the following from `CommTimeMonitor`; None without it
    comm_s: Interval | None  # communication in a step; None as the next two if the gradient sync was not observed
    exposed_s: Interval | None  # exposed communication in a step
    exposed_share: Interval | None  # of the step, 0 to 1
    wire_bytes: float | None  # payload of a step and rank
    peak_memory_bytes: float | None  # of the rank that needed most
    val_loss: Interval | None  # at the end, of the runs that have a finite one
    val_accuracy: Interval | None  # at the end, 0 to 1
    published: tuple[Published, ...] = ()  # figures of others for the same setting
    is_lossy: bool = False  # the compressor changes gradients
    num_diverged: int = 0  # runs whose loss became NaN or infinite

    @property
    def plan_options(self) -> frozenset[str]:
        """Options of a `CommPlan` that the runs have set."""
        names = (name.split(".") for name in self.runs[0].settings)
        return frozenset(parts[1] for parts in names if parts[0] == "plan" and len(parts) > 1)

    @property
    def is_beyond_limit(self) -> bool:
        """Whether the speed-up is more than communication explains; a tenth may be noise, or work saved elsewhere."""
        if self.speedup is None or self.speedup_limit is None:
            return False
        return self.speedup.median > (1 + _LIMIT_TOLERANCE) * self.speedup_limit


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Throughput of one plan against ranks."""

    sync_method: str  # of the settings, or other values that they share
    num_ranks: tuple[int, ...]  # in rising order, each once
    speedups: tuple[Interval, ...]  # over the first of them, which is one rank if there are such runs
    # f of Amdahl's law, 1 / speed-up = f + (1 - f) / ranks, by least squares; None without one rank, or with less than
    # two points beyond
    serial_share: float | None


@dataclass(frozen=True, kw_only=True)
class Group:
    """Comparable settings, in the order of the sweep: of the same model, data and link."""

    name: str  # distinguishes it from other groups; empty if it is the only one
    settings: tuple[Setting, ...]
    baseline: Setting  # the setting that speed-ups are over
    fastest: Setting  # by median throughput
    scalings: tuple[Scaling, ...]  # one for each plan that ran on several numbers of ranks
    answer: tuple[str, ...]  # sentences: the fastest plan, its speed-up and loss; or that there is no difference
    recommended: Setting | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """The whole report: groups in the order of the sweeps, failed runs, warnings, and conditions by name."""

    title: str
    groups: tuple[Group, ...]
    failed: tuple[Run, ...]
    problems: tuple[str, ...]
    conditions: Mapping[str, str]
