"""The conditions of runs, and where they differ between compared runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from lightning_commopt.measure.runs.record import RunRecord
from lightning_commopt.measure.runs.settings import text_of
from lightning_commopt.report.model import Group, Run
from lightning_commopt.report.names import display_name, setting_name
from lightning_commopt.report.runs import FoundRuns

_NUM_COMMIT_DIGITS = 10


def title_of(found: FoundRuns, folders: Sequence[Path]) -> str:
    """Returns the names of the experiments, or else of the directories."""
    names = dict.fromkeys(run.settings.get("experiment") for run in (*found.finished, *found.failed))
    named = [display_name(name) for name in names if isinstance(name, str)]
    return ", ".join(named or dict.fromkeys(folder.resolve().name for folder in folders))


def conditions_of(found: FoundRuns) -> dict[str, str]:
    """Returns what a reader must know to judge the numbers, name to value."""
    runs = [*found.finished, *found.failed]
    days = sorted({run.record.started_at[:10] for run in runs if run.record.started_at})
    conditions = {
        "runs": f"{len(found.finished)} finished" + (f", {len(found.failed)} failed" if found.failed else ""),
        "hardware": _all(runs, lambda run: _hardware(run.record)),
        "trained on": _all(runs, lambda run: run.record.device),
        "ranks": _all(runs, lambda run: str(run.record.world_size or "")),
        "link": _all(runs, link_of),
        "parameters": _all(runs, lambda run: _num_parameters(run.record)),
        "samples a rank and batch": _all(runs, lambda run: _setting_text(run, "data.batch_size")),
        "timed steps": _all(runs, lambda run: str(run.record.num_timed_steps or "")),
        "versions": _all(runs, lambda run: ", ".join(f"{name} {v}" for name, v in run.record.versions.items())),
        "git": _all(runs, lambda run: _commit(run.record)),
        "date": " to ".join(dict.fromkeys([*days[:1], *days[-1:]])),
    }
    return {name: value for name, value in conditions.items() if value}


def link_of(run: Run) -> str | None:
    """Returns the rate of the links between the hosts of a run, in words; None without such links."""
    link = _setting_text(run, "link")
    return None if link is None else setting_name({"link": link}) or None


def _setting_text(run: Run, name: str) -> str | None:
    value = run.settings.get(name)
    return None if value is None else text_of(value)


def find_mixed_conditions(groups: Iterable[Group]) -> list[str]:
    """Returns a line for each condition that differs between runs of a group."""
    lines: dict[str, list[str]] = {}
    groups = list(groups)
    for group in groups:
        runs = [run for setting in group.settings for run in setting.runs]
        for line in _find_mixed(runs):
            lines.setdefault(line, []).append(group.name)
    return [f"{'' if len(names) == len(groups) else ', '.join(names) + ': '}{line}" for line, names in lines.items()]


def _find_mixed(runs: Sequence[Run]) -> list[str]:
    records = [run.record for run in runs]
    packages = dict.fromkeys(name for record in records for name in record.versions)
    found: dict[str, list[str | None]] = {
        **{f"versions of {name}": [record.versions.get(name) for record in records] for name in packages},
        "hardware": list(map(_hardware, records)),
        "devices": [record.device for record in records],
        "git commits": list(map(_commit, records)),
        "numbers of parameters": list(map(_num_parameters, records)),
    }
    distinct = {what: dict.fromkeys(value for value in values if value) for what, values in found.items()}
    return [
        f"runs with different {what} are compared: {' and '.join(values)}"
        for what, values in distinct.items()
        if len(values) > 1
    ]


def _all(runs: Iterable[Run], read: Callable[[Run], str | None]) -> str:
    return "; ".join(dict.fromkeys(value for run in runs if (value := read(run))))


def _hardware(record: RunRecord) -> str:
    shown = Counter(
        f"{device.get('name', device.get('kind', 'unknown'))}"
        + (f", {device['num_cores']} cores" if device.get("kind") == "cpu" and "num_cores" in device else "")
        for device in record.hardware
    )
    return " + ".join(name if count == 1 else f"{count}x {name}" for name, count in shown.items())


def _num_parameters(record: RunRecord) -> str | None:
    return None if record.num_parameters is None else f"{record.num_parameters / 1e6:.3g} M"


def _commit(record: RunRecord) -> str | None:
    commit = (record.git or {}).get("commit")
    if not isinstance(commit, str):
        return None
    return commit[:_NUM_COMMIT_DIGITS] + (" with changes" if (record.git or {}).get("has_changes") else "")
