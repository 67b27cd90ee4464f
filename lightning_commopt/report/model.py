"""What a report is made of. Terminal, JSON, CSV and page show these objects; none of them computes anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_commopt.measure.runs.losses import LossPoint
from lightning_commopt.measure.runs.record import RunRecord

Difference = Literal["faster", "slower", "no difference", "unknown"]
"""Of a throughput from the baseline's; unknown where runs are single, or too few to tell a difference from noise."""

_LIMIT_TOLERANCE = 0.1


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run as its directory has it.

    Attributes:
        folder: the directory.
        record: what it was, and what came out.
        repetition: counted from 0 among the runs of a setting.
        losses: the curve; empty where there is none.
        name: of the directory, for people: relative to the one that was asked for.
        root: the directory that was asked for.
        group: name of the group that it belongs to.
        setting: name of the setting that it belongs to; a failed run may be the only one of its name.
        has_steps: there are records of its steps, and not more than can be read in seconds.
    """

    folder: Path
    record: RunRecord
    repetition: int = 0
    losses: tuple[LossPoint, ...] = ()
    name: str = ""
    root: Path = Path()
    group: str = ""
    setting: str = ""
    has_steps: bool = True

    @property
    def settings(self) -> Mapping[str, Any]:
        """Everything that was configured: dotted names to values."""
        return self.record.settings


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The median of a number over the repetitions of a run, and where it may lie.

    Attributes:
        median: over repetitions.
        low: lower end of the 95 % interval of the median, which is the range of less than six values; None
            with a single one, and for what others are divided by.
        high: upper end; None as well.
        num_values: repetitions.
    """

    median: float
    low: float | None
    high: float | None
    num_values: int


@dataclass(frozen=True, kw_only=True)
class Published:
    """A figure of somebody else's, to stand beside ours.

    Attributes:
        label: what it says, with its unit: "8.91 steps/s on 8x L40S (PCIe)".
        source: where it is from.
        speedup: over the same baseline as ours; None where it says something else.
    """

    label: str
    source: str
    speedup: float | None = None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The runs that differ in nothing but repetition and seed.

    Attributes:
        name: short, and unique in its group: "bf16, 100 MB buckets, 4 ranks".
        values: what the sweep varied, name to value.
        sync_method: short name of how the gradients travel.
        world_size: ranks.
        bucket_cap_mb: MiB in a bucket; None for DDP's default or several sizes.
        config_lines: YAML to paste: what makes `commopt-train`, or ``CommOptDDP``, do the same.
        runs: the finished ones, by repetition.
        samples_per_s: over all ranks; what settings are compared by.
        steps_per_s: optimizer steps.
        speedup: of samples_per_s over the baseline of the group, from pairs of the same repetition; None for the
            baseline itself.
        difference: what `speedup` says beyond noise; None for the baseline itself.
        speedup_limit: what hiding all communication of the baseline could give; None where nobody measured that, or
            the setting differs in more than the plan.
        efficiency: speed-up over one rank, divided by the ranks; None without runs on one rank in the group.
        step_s: seconds of a step, as all of the following from `CommTimeMonitor`; None where it was not there.
        comm_s: of a step, communication; None as the next two where nobody sees the gradient sync of several ranks.
        exposed_s: of a step, communication that nothing hides.
        exposed_share: of the step, 0 to 1.
        wire_bytes: payload a step and rank.
        peak_memory_bytes: of the rank that needed most.
        val_loss: at the end, of the runs that have a finite one.
        val_accuracy: at the end, 0 to 1.
        published: figures of others for the same setting.
        is_lossy: the gradients that arrive are not those that were sent.
        num_diverged: runs whose loss became NaN or infinite.
    """

    name: str
    values: Mapping[str, str]
    sync_method: str
    world_size: int
    bucket_cap_mb: float | None
    config_lines: tuple[str, ...]
    runs: tuple[Run, ...]
    samples_per_s: Interval | None
    steps_per_s: Interval | None
    speedup: Interval | None = None
    difference: Difference | None = None
    speedup_limit: float | None = None
    efficiency: float | None = None
    step_s: Interval | None
    comm_s: Interval | None
    exposed_s: Interval | None
    exposed_share: Interval | None
    wire_bytes: float | None
    peak_memory_bytes: float | None
    val_loss: Interval | None
    val_accuracy: Interval | None
    published: tuple[Published, ...] = ()
    is_lossy: bool = False
    num_diverged: int = 0

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
    """Throughput of one plan against ranks.

    Attributes:
        sync_method: of the settings, or what else they have in common.
        num_ranks: in rising order, each once.
        speedups: over the first of them, which is one rank where there are such runs.
        serial_share: f of Amdahl's law, 1 / speed-up = f + (1 - f) / ranks, by least squares; None with less than two
            points beyond one rank, and without that.
    """

    sync_method: str
    num_ranks: tuple[int, ...]
    speedups: tuple[Interval, ...]
    serial_share: float | None


@dataclass(frozen=True, kw_only=True)
class Group:
    """Settings that can be compared: the same model, data and link.

    Attributes:
        name: what distinguishes it from the other groups; empty if it is the only one.
        settings: in the order of the sweep.
        baseline: one of them, which the speed-ups are over.
        fastest: by median throughput.
        scalings: one for each plan that was run on several numbers of ranks; with those on one rank, if there are any.
        answer: sentences: the fastest plan, by how much, at what loss; or that there is no difference.
        recommended: what the answer says to use; None where it cannot say.
    """

    name: str
    settings: tuple[Setting, ...]
    baseline: Setting
    fastest: Setting
    scalings: tuple[Scaling, ...]
    answer: tuple[str, ...]
    recommended: Setting | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that a report says.

    Attributes:
        title: of the page.
        groups: in the order of the sweeps.
        failed: runs without a result; their records say why.
        problems: what could not be read or should be known, a line each.
        conditions: hardware, versions, link, dates: name to value.
    """

    title: str
    groups: tuple[Group, ...]
    failed: tuple[Run, ...]
    problems: tuple[str, ...]
    conditions: Mapping[str, str]
