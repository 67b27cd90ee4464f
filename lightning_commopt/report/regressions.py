"""Compares a report with an earlier one: which settings became slower beyond noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_commopt.measure.plain import check_format, check_numbers, parse_json
from lightning_commopt.report.build import build_report
from lightning_commopt.report.intervals import Interval, compare
from lightning_commopt.report.outputs import FORMAT, to_plain
from lightning_commopt.text.formatting import grouped

# What became of a setting. It is "failed" if runs failed now but none did before, or if all failed now but not before;
# "unknown" if there are too few runs.
Outcome = Literal["slower", "failed", "unknown", "missing", "faster", "new", "no difference"]

# A machine's throughput varies by about this share between days, which the runs of a single sweep cannot show.
DEFAULT_TOLERANCE = 0.05

_CONDITIONS = ("hardware", "trained on", "ranks", "link", "parameters", "samples a rank and batch", "versions")


@dataclass(frozen=True, kw_only=True)
class Change:
    """How a setting changed: samples per second before and now, and their ratio; None if one is missing."""

    group: str
    setting: str
    outcome: Outcome
    ratio: Interval | None = None
    before: float | None = None
    now: float | None = None
    error: str | None = None  # the error of the first failed run


@dataclass(frozen=True, kw_only=True)
class Regressions:
    """All changes from an earlier report, ``other``, and a line for each condition that changed."""

    other: str
    tolerance: float
    changes: tuple[Change, ...]
    conditions: tuple[str, ...]

    @property
    def is_worse(self) -> bool:
        """Whether a setting became slower beyond noise and tolerance, or failed that had worked."""
        return any(change.outcome in ("slower", "failed") for change in self.changes)

    def to_plain(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "is_worse": self.is_worse}


@dataclass(frozen=True, kw_only=True, eq=False)
class _Entry:
    """A setting in a report's JSON; without runs if all of them failed."""

    group: str
    name: str
    sync_method: str
    settings: Mapping[str, str]
    runs: list[dict[str, Any]]
    samples_per_s: float | None
    errors: list[str]
    world_size: int | None = None

    @property
    def plan(self) -> tuple[str, str | None]:
        """How gradients are exchanged, as far as the runs say."""
        return self.sync_method, self.runs[0].get("plan_name") if self.runs else None

    @property
    def rates(self) -> list[float]:
        rates = [run["samples_per_s"] for run in self.runs]
        return [float(rate) for rate in rates if rate is not None and rate > 0]

    def differing_from(self, other: _Entry) -> str:
        """Returns the choices that another setting does not have."""
        own = self.settings.items()
        return " ".join(f"{name}={value}" for name, value in own if other.settings.get(name) != value) or "unset"


def find_regressions(report: Mapping[str, Any], other: Path, *, tolerance: float = DEFAULT_TOLERANCE) -> Regressions:
    """Compares a report with an earlier one.

    Settings are the same if all their choices are. Runs that Hydra did not start have no choices, and the names of
    their settings tell only what varies within a report. So they are the same if they have the same plan on the same
    number of ranks, or else the same name, unless their plans differ. Throughputs are compared without pairs, as they
    were measured at different times. A setting is "slower" only if its whole interval lies below the tolerance.

    Args:
        report: the result of `to_plain`.
        other: a sweep's directory, or a file with the output of ``commopt report --json``.
        tolerance: share of the throughput that a setting may lose, from 0 to below 1.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else, the two have no setting in common, or the tolerance is not a share.
    """
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance must be a share, from 0 to below 1, got {tolerance!r}")
    before = _load(other)
    try:
        pairs = _pairs(_entries(report), _entries(before))
        changes = tuple(_change(current, previous, tolerance) for current, previous in pairs)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{other} is not what commopt report --json prints: {type(error).__name__} {error}") from None
    in_both = [(current, previous) for current, previous in pairs if current is not None and previous is not None]
    if not in_both:
        raise ValueError(f"{other} has no setting in common with this report: nothing can be compared")
    conditions, earlier = report.get("conditions", {}), before.get("conditions", {})
    lines = [
        f"{name}: {conditions.get(name, 'unknown')}; before: {earlier.get(name, 'unknown')}"
        for name in _CONDITIONS
        if conditions.get(name) != earlier.get(name)
    ]
    lines += [
        f"{current.name}: {current.differing_from(previous)}; before: {previous.differing_from(current)}"
        for current, previous in in_both
        if current.settings != previous.settings
    ]
    shown = other.resolve().name if other.is_absolute() else str(other)
    return Regressions(other=shown, tolerance=tolerance, changes=changes, conditions=tuple(lines))


def _load(path: Path) -> dict[str, Any]:
    if path.is_dir():
        return to_plain(build_report([path]))
    if not path.exists():
        raise FileNotFoundError(
            f"--earlier {path} does not exist: give the directory of a sweep, or a file that holds the output of"
            " commopt report --json"
        )
    try:
        report = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is neither a directory nor what commopt report --json prints: {error}") from error
    if not isinstance(report, dict) or not {"format", "groups", "failed"} <= report.keys():
        raise ValueError(f"{path} is not what commopt report --json prints")
    check_format(path, report["format"], FORMAT)
    return report


def _entries(report: Mapping[str, Any]) -> list[_Entry]:
    errors = grouped(((run["group"], run["setting"]), str(run["error"])) for run in report["failed"])
    settings = [(group["name"], setting) for group in report["groups"] for setting in group["settings"]]
    settings += [(run["group"], {**run, "name": run["setting"], "runs": []}) for run in report["failed"]]
    entries: dict[tuple[str, str], _Entry] = {}
    for group, setting in settings:
        key = group, setting["name"]
        median = setting["samples_per_s"]["median"] if setting["runs"] and setting["samples_per_s"] else None
        check_numbers([run.get("samples_per_s") for run in setting["runs"]], f"{setting['name']}: samples_per_s")
        known = {name: setting[name] for name in ("name", "sync_method", "settings", "runs")}
        known |= {"world_size": setting.get("world_size"), "samples_per_s": median, "errors": errors.get(key, [])}
        entries.setdefault(key, _Entry(group=group, **known))
    return list(entries.values())


def _pairs(ours: list[_Entry], theirs: list[_Entry]) -> list[tuple[_Entry | None, _Entry | None]]:
    """Returns the settings of both reports in pairs, in the order of the first report; then settings it lacks."""
    partners: dict[_Entry, _Entry] = {}
    for is_same in (_has_same_choices, _has_same_setup, _has_same_name, _has_same_plan):
        for setting in ours:
            candidates = [other for other in theirs if other not in partners.values() and is_same(other, setting)]
            if candidates and setting not in partners:
                # A part of a sweep may have other names for equal choices. Runs that Hydra did not start have the same
                # choices under several names; then the name decides.
                partners[setting] = next(
                    (other for other in candidates if _has_same_name(other, setting)), candidates[0]
                )
    missing = [other for other in theirs if other not in partners.values()]
    return [*((setting, partners.get(setting)) for setting in ours), *((None, other) for other in missing)]


def _has_same_choices(setting: _Entry, other: _Entry) -> bool:
    return bool(setting.settings) and setting.settings == other.settings


def _has_same_setup(setting: _Entry, other: _Entry) -> bool:
    is_known = setting.runs and other.runs and not setting.settings and not other.settings
    own, others = ((entry.group, entry.plan, entry.world_size) for entry in (setting, other))
    return bool(is_known) and own == others


def _has_same_name(setting: _Entry, other: _Entry) -> bool:
    is_other_plan = setting.runs and other.runs and not setting.settings and setting.plan != other.plan
    return not is_other_plan and (setting.group, setting.name) == (other.group, other.name)


def _has_same_plan(setting: _Entry, other: _Entry) -> bool:
    """Returns whether failed runs, whose records may hold only the plan, belong to another setting."""
    is_known = other.runs or setting.settings or other.settings
    return not is_known and (setting.group, setting.sync_method) == (other.group, other.sync_method)


def _change(current: _Entry | None, previous: _Entry | None, tolerance: float) -> Change:
    shown = current or previous
    assert shown is not None
    change = Change(group=shown.group, setting=shown.name, outcome="no difference")
    if (
        current is not None
        and current.errors
        and previous is not None
        and previous.runs
        and not (current.runs and previous.errors)
    ):
        return dataclasses.replace(change, outcome="failed", error=current.errors[0])
    rates, earlier = ([] if entry is None else entry.rates for entry in (current, previous))
    if current is None or previous is None or not rates or not earlier:
        outcome: Outcome = "new" if rates else "missing" if earlier else "unknown"
        return dataclasses.replace(change, outcome=outcome)
    ratio, outcome = compare(rates, earlier, is_paired=False)
    if outcome == "slower" and (ratio.high is None or ratio.high >= 1 - tolerance):
        outcome = "no difference"
    return dataclasses.replace(
        change, outcome=outcome, ratio=ratio, before=previous.samples_per_s, now=current.samples_per_s
    )
