"""Compares a report with an earlier one: what has become slower beyond noise."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_commopt.report.build import build_report
from lightning_commopt.report.intervals import Comparison, compare
from lightning_commopt.report.model import Difference, Interval
from lightning_commopt.report.outputs import FORMAT, to_plain

Outcome = Literal["slower", "failed", "unknown", "missing", "faster", "new", "no difference"]
"""Of a setting: "failed" where runs failed and none did before, or all do and some had worked; "unknown" where runs are
too few to tell."""

DEFAULT_TOLERANCE = 0.05
"""Share of the throughput by which a machine is another one at another time, whatever the runs of one sweep say."""

_CONDITIONS = ("hardware", "trained on", "ranks", "link", "parameters", "samples a rank and batch", "versions")


@dataclass(frozen=True, kw_only=True)
class Change:
    """What has become of a setting.

    Attributes:
        group: name of its group.
        setting: its name.
        outcome: what happened.
        ratio: of the throughput now over that before; None where one of them is not there.
        before: samples per second.
        now: samples per second.
        error: of the first failed run.
    """

    group: str
    setting: str
    outcome: Outcome
    ratio: Interval | None = None
    before: float | None = None
    now: float | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Regressions:
    """All changes from one report to another.

    Attributes:
        other: what the earlier one is called.
        changes: of all settings of both.
        conditions: a line for each condition that is not what it was.
        tolerance: share of the throughput that a setting may lose.
    """

    other: str
    tolerance: float
    changes: tuple[Change, ...]
    conditions: tuple[str, ...]

    @property
    def is_worse(self) -> bool:
        """Whether something became slower beyond noise and tolerance, or failed that had worked."""
        return any(change.outcome in ("slower", "failed") for change in self.changes)

    def to_plain(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "is_worse": self.is_worse}


def find_regressions(report: Mapping[str, Any], other: Path, *, tolerance: float = DEFAULT_TOLERANCE) -> Regressions:
    """Compares a report with an earlier one.

    Settings are the same if everything that was chosen is, or else group and name. Throughputs are compared without
    pairs: the two were measured at different times.

    Args:
        report: as `to_plain` makes it.
        other: a sweep's directory, or a file with what ``commopt report --json`` printed.
        tolerance: "slower" is only what is slower by more than this share with its whole interval.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else, the two have no setting in common, or the tolerance is not a share.
    """
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance must be a share, from 0 to below 1, got {tolerance!r}")
    before = _load(other)
    try:
        pairs = _pairs(report, before)
        changes = [_change(now, then, report, before, tolerance) for now, then in pairs]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{other} is not what commopt report --json prints: {type(error).__name__} {error}") from error
    if not any(now is not None and then is not None for now, then in pairs):
        raise ValueError(f"{other} has no setting in common with this report: nothing can be compared")
    conditions = (*_conditions(report, before), *_other_settings(pairs))
    shown = other.resolve().name if other.is_absolute() else str(other)
    return Regressions(other=shown, tolerance=tolerance, changes=tuple(changes), conditions=conditions)


def _load(path: Path) -> dict[str, Any]:
    if path.is_dir():
        return to_plain(build_report([path]))
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is neither a directory nor what commopt report --json prints: {error}") from error
    if not isinstance(report, dict) or not {"format", "groups", "failed"} <= report.keys():
        raise ValueError(f"{path} is not what commopt report --json prints")
    if not isinstance(report["format"], int) or report["format"] > FORMAT:
        raise ValueError(f"{path} has format {report['format']!r}, this version reads up to {FORMAT}")
    return report


class _Place(dict[str, Any]):
    """A setting of a report's JSON, which knows its group."""

    def __init__(self, group: str, setting: Mapping[str, Any]) -> None:
        super().__init__(setting)
        self.group = group


def _settings(report: Mapping[str, Any]) -> Iterator[_Place]:
    """Yields the settings, and those of which all runs failed."""
    known = set()
    for group in report["groups"]:
        for setting in group["settings"]:
            known.add((group["name"], setting["name"]))
            yield _Place(group["name"], setting)
    for run in report["failed"]:
        name = (run["group"], run["setting"])
        if name not in known:
            known.add(name)
            of_run = {"sync_method": run["sync_method"], "settings": run["settings"], "runs": []}
            yield _Place(run["group"], {"name": run["setting"], **of_run})


def _pairs(report: Mapping[str, Any], before: Mapping[str, Any]) -> list[tuple[_Place | None, _Place | None]]:
    """Returns the settings of both reports side by side, those of the report first."""
    ours, theirs = list(_settings(report)), list(_settings(before))
    found: dict[int, _Place] = {}
    for is_same in (_has_settings_of, _has_name_of, _has_plan_of):
        for index, setting in enumerate(ours):
            left = [each for each in theirs if not any(each is other for other in found.values())]
            same = [each for each in left if is_same(each, setting)]
            if same and index not in found:
                # Equal choices with other names: a part of a sweep. With several names: not made by Hydra.
                found[index] = next((each for each in same if _has_name_of(each, setting)), same[0])
    missing = [each for each in theirs if not any(each is other for other in found.values())]
    return [*((setting, found.get(index)) for index, setting in enumerate(ours)), *((None, each) for each in missing)]


def _has_settings_of(setting: _Place, other: _Place) -> bool:
    return bool(setting["settings"]) and setting["settings"] == other["settings"]


def _has_name_of(setting: _Place, other: _Place) -> bool:
    return (setting.group, setting["name"]) == (other.group, other["name"])


def _has_plan_of(setting: _Place, other: _Place) -> bool:
    """Returns whether a setting is that of failed runs, of which little more than the plan is known."""
    is_known = other["runs"] or setting["settings"] or other["settings"]
    return not is_known and (setting.group, setting["sync_method"]) == (other.group, other["sync_method"])


def _change(
    now: _Place | None, then: _Place | None, report: Mapping[str, Any], before: Mapping[str, Any], tolerance: float
) -> Change:
    shown = now or then
    assert shown is not None
    change = Change(group=shown.group, setting=shown["name"], outcome="no difference")
    errors = [] if now is None else _errors(now, report)
    all_fail = now is not None and not now["runs"]
    had_worked = then is not None and bool(then["runs"]) and (all_fail or not _errors(then, before))
    if errors and had_worked:
        return dataclasses.replace(change, outcome="failed", error=errors[0])
    rates, earlier = _rates(now), _rates(then)
    if not rates or not earlier:
        outcome: Outcome = "new" if rates else "missing" if earlier else "unknown"
        return dataclasses.replace(change, outcome=outcome)
    comparison = compare(rates, earlier, is_paired=False)
    assert now is not None
    assert then is not None
    return dataclasses.replace(
        change,
        outcome=_difference(comparison, tolerance),
        ratio=comparison.ratio,
        before=then["samples_per_s"]["median"],
        now=now["samples_per_s"]["median"],
    )


def _difference(comparison: Comparison, tolerance: float) -> Difference:
    high = comparison.ratio.high
    if comparison.difference == "slower" and (high is None or high >= 1 - tolerance):
        return "no difference"
    return comparison.difference


def _rates(setting: _Place | None) -> list[float]:
    rates = [] if setting is None else [run["samples_per_s"] for run in setting["runs"]]
    return [float(rate) for rate in rates if rate is not None and rate > 0]


def _errors(setting: _Place, report: Mapping[str, Any]) -> list[str]:
    name = (setting.group, setting["name"])
    return [str(run["error"]) for run in report["failed"] if (run["group"], run["setting"]) == name]


def _conditions(report: Mapping[str, Any], before: Mapping[str, Any]) -> tuple[str, ...]:
    now, then = report.get("conditions", {}), before.get("conditions", {})
    return tuple(
        f"{name}: {now.get(name, 'unknown')}; before: {then.get(name, 'unknown')}"
        for name in _CONDITIONS
        if now.get(name) != then.get(name)
    )


def _other_settings(pairs: Sequence[tuple[_Place | None, _Place | None]]) -> list[str]:
    """Returns a line for each setting that has its name in common with an earlier one, and other choices."""
    return [
        f"{now['name']}: {_differing(now, then)}; before: {_differing(then, now)}"
        for now, then in pairs
        if now is not None and then is not None and now["settings"] != then["settings"]
    ]


def _differing(setting: _Place, other: _Place) -> str:
    """Returns the choices that another setting does not have."""
    own, others = setting["settings"], other["settings"]
    return " ".join(f"{name}={value}" for name, value in own.items() if others.get(name) != value) or "unset"
