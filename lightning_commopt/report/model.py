"""The data of a report, and one list of columns for its table on the terminal, on the page, in CSV and JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lightning_commopt.measure.runs.losses import LossPoint
from lightning_commopt.measure.runs.record import RunRecord, Tuning
from lightning_commopt.measure.runs.settings import Settings, Value
from lightning_commopt.report.choices import STRATEGIES, changes_training, is_seed
from lightning_commopt.report.intervals import TIMES, Difference, Interval, spread_text
from lightning_commopt.text.formatting import number, percent

_LIMIT_TOLERANCE = 0.1


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that has ended."""

    folder: Path
    record: RunRecord
    repetition: int = 0  # counted from 0 among the runs of a setting
    losses: tuple[LossPoint, ...] = ()  # the loss curve; may be empty
    name: str = ""  # the run's directory, relative to the directory that the user named
    group: str = ""
    setting: str = ""  # name of its setting; a failed run may be the only one of its name
    has_steps: bool = True  # whether its steps are recorded, and few enough to be read in seconds
    tuning: Tuning | None = None  # the results of ``plan="auto"``; None without it

    @property
    def settings(self) -> Settings:
        """What the run was set to."""
        return self.record.settings

    @property
    def choices(self) -> dict[str, Value]:
        """The values of all overrides that can change the training, even if all runs share them."""
        return {name: value for name, value in self.settings.chosen.items() if changes_training(name)}

    @property
    def bucket_cap(self) -> Value:
        """``bucket_cap_mb`` of the run's strategy: a number, several, or None for the default."""
        if self.settings.plan is not None:
            return self.settings.plan.get("bucket_cap_mb")
        caps = (self.settings.get(f"{node}bucket_cap_mb") for node in STRATEGIES)
        return next((cap for cap in caps if cap is not None), None)

    @property
    def repetition_key(self) -> tuple[object, ...]:
        """A key that is equal for runs of different settings in the same repetition of a sweep."""
        chosen = self.settings.chosen
        seeds = frozenset((name, value) for name, value in chosen.items() if is_seed(name))
        return self.folder.parent, seeds, chosen.get("repetition", f"number {self.repetition}")

    @property
    def has_diverged(self) -> bool:
        """Whether the final validation loss, or the loss at the end of training, is NaN or infinite."""
        trained = [point.loss for point in self.losses if point.kind == "train"]
        return any(loss is not None and not math.isfinite(loss) for loss in (self.record.val_loss, *trained[-1:]))

    @property
    def throughput(self) -> float | None:
        """Samples per second over all ranks; None without a positive finite number."""
        rate = self.record.samples_per_s
        return rate if rate is not None and math.isfinite(rate) and rate > 0 else None


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published figure to compare with, such as "8.91 steps/s on 8x L40S (PCIe)", and its publication."""

    label: str
    source: str
    speedup: float | None = None  # the published speed-up over the same baseline as ours; None for other figures


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Runs that differ only in repetition and seed."""

    name: str  # short, and unique in its group: "bf16, 100 MiB buckets, 4 ranks"
    values: Mapping[str, Value]  # the options that the sweep varied, with this setting's values
    sync_method: str  # see `RunRecord`
    world_size: int
    bucket_cap_mb: float | None  # MiB in a bucket; None for DDP's default or several sizes
    config_lines: tuple[str, ...]  # YAML with which `commopt-train` or ``CommOptDDP`` does the same
    runs: tuple[Run, ...]  # the finished runs, by repetition
    samples_per_s: Interval | None  # throughput over all ranks, by which settings are compared
    steps_per_s: Interval | None
    speedup: Interval | None = None  # ratio of `samples_per_s` to the baseline's; None for the baseline itself
    difference: Difference | None = None  # whether `speedup` differs from 1 beyond noise; None for the baseline itself
    # The speed-up if all communication of the baseline were hidden; None if it was not measured, or if the setting
    # differs from the baseline in more than the plan.
    speedup_limit: float | None = None
    efficiency: float | None = None  # speed-up over one rank, divided by the number of ranks; None if unknown
    # `CommTimeMonitor` measures these four; they are None without it. The last three are also None if the gradient sync
    # was not observed.
    step_s: Interval | None  # duration of a step
    step_s_p95: Interval | None = None  # the duration that 95 % of the steps of a run stay below
    comm_s: Interval | None  # communication in a step
    exposed_s: Interval | None  # exposed communication in a step
    exposed_share: Interval | None  # exposed communication as a share of the step, 0 to 1
    wire_bytes: float | None  # payload that a rank sends in a step
    peak_memory_bytes: float | None  # peak memory of the rank that needed most
    val_loss: Interval | None  # final validation loss, of the runs in which it is finite
    val_accuracy: Interval | None  # final validation accuracy, 0 to 1
    published: tuple[Published, ...] = ()  # figures that others have published for the same setting
    is_lossy: bool = False  # whether the compressor changes gradients
    # Change of `val_loss` against the baseline's median, as a share of it; the baseline's own is 0, and its ends are
    # the spread of its losses. None without both losses.
    loss_change: Interval | None = None
    num_diverged: int = 0  # runs whose loss became NaN or infinite

    @property
    def plan_options(self) -> frozenset[str]:
        """The options of a plan that the runs have set."""
        return frozenset(name.partition(".")[0] for name in self.runs[0].settings.plan or ())

    @property
    def is_beyond_limit(self) -> bool:
        """Whether the speed-up is over a tenth more than communication explains; less may be noise."""
        if self.speedup is None or self.speedup_limit is None:
            return False
        return self.speedup.median > (1 + _LIMIT_TOLERANCE) * self.speedup_limit


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Throughput of one plan against ranks."""

    sync_method: str  # the settings' sync method, or a name of other values that they share
    num_ranks: tuple[int, ...]  # rising, without duplicates
    speedups: tuple[Interval, ...]  # speed-ups over the first of `num_ranks`, which is 1 if there are such runs
    # The least-squares fit of f in Amdahl's law, 1 / speed-up = f + (1 - f) / ranks; None if the curve does not begin
    # at one rank, or has less than two points beyond.
    serial_share: float | None


@dataclass(frozen=True, kw_only=True)
class Group:
    """Settings with the same model, data and link, which can be compared, in the order of the sweep."""

    name: str  # distinguishes it from other groups; empty if it is the only one
    settings: tuple[Setting, ...]
    baseline: Setting  # the setting that speed-ups are over
    fastest: Setting  # the setting with the highest median throughput
    scalings: tuple[Scaling, ...]  # one for each plan that ran on several numbers of ranks
    answer: tuple[str, ...]  # sentences: the fastest plan, its speed-up and loss; or that there is no difference
    recommended: Setting | None = None  # the setting that the answer says to use


@dataclass(frozen=True, kw_only=True)
class Report:
    """The whole report: groups in the order of the sweeps, failed runs, warnings, and conditions by name."""

    title: str
    groups: tuple[Group, ...]
    failed: tuple[Run, ...]
    problems: tuple[str, ...]
    conditions: Mapping[str, str]


class Cell(NamedTuple):
    """The content of a cell."""

    text: str = ""  # the number with its significant digits; empty if there is no number
    small: str = ""  # a line below the text: the interval, or a word
    value: float | str | None = None  # the page sorts by this value; None comes last


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column, without its cells."""

    key: str  # the attribute of a `Setting`, and the name in CSV and JSON
    title: str = ""  # the heading on the page, with the unit; empty for columns of CSV and JSON only
    heading: str = ""  # the heading on the terminal; empty if not shown there
    first: Literal["ascending", "descending"] = "ascending"  # how the page's first click sorts: the best comes first
    # Makes the cell from the attribute, the setting and its group.
    show: Callable[[Any, Setting, Group], Cell] = lambda value, setting, group: Cell()
    is_published: bool = False  # whether the column has figures that others have published


def columns_of(group: Group) -> list[tuple[Column, list[Cell]]]:
    """Returns the columns for which a group has numbers, with a cell for each setting."""
    columns = [
        (column, [column.show(getattr(setting, column.key), setting, group) for setting in group.settings])
        for column in COLUMNS
    ]
    return [(column, cells) for column, cells in columns if any(cell.text for cell in cells)]


def difference_in_words(setting: Setting) -> str:
    """Returns how certain a setting's speed-up is: "faster", "uncertain", or that the machine may have been busy."""
    if setting.is_beyond_limit:
        return "machine busy?"
    if setting.difference == "unknown" and setting.speedup is not None:
        return "measured once" if setting.speedup.num_values == 1 else "uncertain"
    return setting.difference or ""


def _interval(value: Interval | None, *_: object, digits: int = 3) -> Cell:
    return (
        Cell() if value is None else Cell(number(value.median, digits), spread_text(value, digits=digits), value.median)
    )


def speedup_cell(speedup: Interval | None, setting: Setting, group: Group) -> Cell:
    """Returns the speed-up, and how certain it is."""
    if setting is group.baseline and len(group.settings) > 1:
        return Cell("baseline", value=1.0)
    if speedup is None:
        return Cell()
    text = f"{number(speedup.median)}{TIMES} {difference_in_words(setting)}".rstrip()
    return Cell(text, spread_text(speedup), speedup.median)


def _share(value: Interval | float | None, *_: object) -> Cell:
    share = value.median if isinstance(value, Interval) else value
    return Cell() if share is None else Cell(percent(share), value=share)


def _megabytes(num_bytes: float | None, *_: object) -> Cell:
    return Cell() if num_bytes is None else Cell(number(num_bytes / 1e6), value=num_bytes)


def _loss(val_loss: Interval | None, setting: Setting, group: Group) -> Cell:
    diverged = f"diverged: {setting.num_diverged} of {len(setting.runs)} runs" if setting.num_diverged else ""
    cell = _interval(val_loss, digits=4)
    return Cell(cell.text or ("-" if diverged else ""), "\n".join(filter(None, [cell.small, diverged])), cell.value)


def loss_change_text(change: Interval) -> str:
    """Returns a relative change of the loss as a percentage with its sign, and the ends of its interval.

    >>> loss_change_text(Interval(median=0.0123, low=0.01, high=0.02, num_values=3))
    '+1.23 % (+1.00 to +2.00 %)'
    """
    ends = _signed_ends(change)
    return f"{_signed(change.median)} %{f' ({ends} %)' if ends else ''}"


def _signed(share: float) -> str:
    return f"{100 * share:+.2f}" if round(100 * share, 2) else "0"


def _signed_ends(change: Interval) -> str:
    return "" if change.low is None or change.high is None else f"{_signed(change.low)} to {_signed(change.high)}"


def _loss_change(change: Interval | None, setting: Setting, group: Group) -> Cell:
    """Returns the change of the loss; for the baseline the band in which a change is noise."""
    if change is None or len(group.settings) == 1:
        return Cell()
    small = _signed_ends(change) or "measured once"
    text = "baseline" if setting is group.baseline else _signed(change.median)
    return Cell(text, f"band {small}" if text == "baseline" and change.low is not None else small, change.median)


def _milliseconds(time_s: Interval | None, *_: object) -> Cell:
    return Cell() if time_s is None else _interval(time_s.scaled(1e3))


def _published(figures: Sequence[Published], *_: object) -> Cell:
    speedups = [figure.speedup for figure in figures if figure.speedup is not None]
    return Cell("\n".join(figure.label for figure in figures), value=max(speedups, default=None))


COLUMNS = (
    Column(key="world_size", title="ranks", show=lambda value, *_: Cell(str(value), value=value)),
    Column(key="samples_per_s", title="samples/s", heading="samples/s", first="descending", show=_interval),
    Column(key="speedup", title="speed-up", heading="speed-up", first="descending", show=speedup_cell),
    Column(key="steps_per_s", title="steps/s", first="descending", show=_interval),
    Column(key="efficiency", title="efficiency", heading="efficiency", first="descending", show=_share),
    Column(key="step_s_p95", title="p95 of steps (ms)", show=_milliseconds),
    Column(key="exposed_share", title="exposed share of a step", heading="exposed", show=_share),
    Column(key="wire_bytes", title="MB sent per step and rank", heading="MB sent", show=_megabytes),
    Column(key="val_loss", title="final validation loss", heading="final loss", show=_loss),
    Column(key="loss_change", title="change of loss (%)", show=_loss_change),
    Column(key="val_accuracy", title="final validation accuracy", first="descending", show=_share),
    Column(key="peak_memory_bytes", title="peak memory (MB)", heading="peak MB", show=_megabytes),
    Column(
        key="published",
        title="published by others, on their hardware",
        first="descending",
        show=_published,
        is_published=True,
    ),
    *(Column(key=key) for key in ("speedup_limit", "step_s", "comm_s", "exposed_s")),
)
