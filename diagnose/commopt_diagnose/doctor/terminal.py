"""Prints the doctor's findings and hang reports on a terminal."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from textwrap import shorten

from rich.console import Console
from rich.text import Text

from commopt_diagnose import findings
from commopt_diagnose.doctor.facts import Facts, first_of_hosts
from lightning_commopt.text.findings import Finding
from lightning_commopt.text.formatting import count, grouped, list_some
from lightning_commopt.text.terminal import TextTable, print_text
from lightning_commopt.watch.hangs.marks import PHASE, PHASES
from lightning_commopt.watch.hangs.records import HangReport, TimedMark
from lightning_commopt.watch.hangs.sentences import operation_text

_HOSTS_SHOWN = 8  # more hosts would hide the findings below them


def print_findings(found: Sequence[Finding], all_facts: Sequence[Facts], console: Console) -> None:
    """Prints findings with advice, the worst first, then what was not checked."""
    hosts = first_of_hosts(all_facts)
    console.print(f"{count(len(all_facts), 'rank')} on {count(len(hosts), 'host')}", highlight=False)
    if len(hosts) > 1:
        _print_interfaces(hosts, console)
    if found:
        is_broken = found[0].severity == "error"
        console.print("Fix this first:" if is_broken else "Nothing must be fixed. These may be worth a look:")
        findings.print_findings(found, console)
    else:
        console.print("Nothing is wrong as far as can be seen before a run.")
    for unchecked in list_unchecked(all_facts):
        print_text(f"not checked: {unchecked}", console, "dim")


def _print_interfaces(hosts: Sequence[Facts], console: Console) -> None:
    """Prints which interfaces gloo and NCCL would use, one line for hosts that agree."""
    names = ([it.name if it else "none" for it in (facts.gloo_interface, facts.nccl_interface)] for facts in hosts)
    for (gloo, nccl), alike in grouped(zip(map(tuple, names), hosts, strict=True)).items():
        shown = list_some([facts.host for facts in alike], _HOSTS_SHOWN)
        print_text(f"{shown}: gloo would use {gloo}, NCCL would use {nccl}", console)


def list_unchecked(all_facts: Sequence[Facts]) -> list[str]:
    """Returns what was not checked, and why."""
    hosts = first_of_hosts(all_facts)
    unchecked = []
    if len(hosts) == 1:
        unchecked.append(
            "connections to other hosts: start this command on each, under torchrun or srun, or with --hosts a,b"
        )
    without = [facts for facts in hosts if facts.no_topology is not None]
    may_have_gpus = [facts for facts in without if facts.gpus or (facts.has_gpu_driver and facts.has_gpu_files)]
    if names := [facts.host for facts in without if facts not in may_have_gpus]:
        unchecked.append(f"links between GPUs: no GPU on {list_some(names)}")
    unread = grouped((facts.no_topology, facts.host) for facts in may_have_gpus)
    unchecked += [f"links between GPUs on {list_some(names)}: {reason}" for reason, names in unread.items()]
    if names := [facts.host for facts in hosts if not facts.ports]:
        named = list_some(names)
        unchecked.append(f"InfiniBand, RoCE and GPUDirect RDMA: no adapter in /sys/class/infiniband of {named}")
    elif not any(facts.environment.get("NCCL_COLLNET_ENABLE") == "1" for facts in all_facts):
        unchecked.append("SHARP: NCCL_COLLNET_ENABLE is not 1")
    return unchecked


_LETTERS = {
    "setup": ("s", "white"),
    "data": ("d", "magenta"),
    "forward": ("f", "green"),
    "backward": ("b", "red"),
    "optimizer": ("o", "yellow"),
    "callbacks": ("c", "cyan"),
    "checkpoint": ("k", "blue"),
    "validation": ("v", "bright_blue"),
    "test": ("t", "bright_blue"),
    "predict": ("p", "bright_blue"),
}
_DETAIL_WIDTH = 60  # characters of an exception; the other columns of the table need the rest of a line
_ENDED = "x"
_SHARE_BEFORE = 0.3  # share of the timeline for the time before the hang
_MIN_S = 1.0  # the timeline shows at least this much of the hang


def print_hang_report(report: HangReport, console: Console) -> None:
    """Prints the diagnosis, hints, a line for each rank, and a timeline of their phases."""
    diagnosis = report.diagnosis
    if report.was_reported:
        print_text(diagnosis.sentence, console, "bold")
        for hint in diagnosis.hints:
            print_text(f"Try: {hint}", console)
    else:
        console.print("No hang was reported. The ranks were last seen like this:", style="bold")
    console.print()
    numbers = "rank", "step", "no progress\nfor"
    headings = "rank", "host", "state", "phase", "step", "no progress\nfor", "waits in", "at"
    table = TextTable(*headings, numbers=numbers, has_rules=False)
    for rank in sorted(report.snapshots, key=lambda snapshot: snapshot.rank):
        known = rank.state not in ("unreachable", "silent")
        table.add_row(
            str(rank.rank),
            rank.host,
            rank.state,
            PHASES[rank.phase].name if known else "",
            str(rank.step) if known else "",
            f"{rank.idle_s:.0f} s" if known else "",
            operation_text(rank) if rank.is_waiting else "",
            next(iter(rank.worker_places), shorten(rank.detail, _DETAIL_WIDTH) or rank.place or ""),
        )
    console.print(table)
    for problem in report.problems:
        print_text(f"left out: {problem}", console, "dim")
    if report.marks:
        console.print()
        _print_timeline(report, console)


def _print_timeline(report: HangReport, console: Console) -> None:
    end_s = report.at_unix_s
    stalled_s = min((marks[-1].at_unix_s for marks in report.marks.values() if marks), default=end_s)
    hang_s = max(end_s - stalled_s, _MIN_S)
    start_s = end_s - hang_s / (1 - _SHARE_BEFORE)
    states = {snapshot.rank: snapshot.state for snapshot in report.snapshots}
    label = max(len(f"rank {rank}") for rank in report.marks)
    num_columns = max(20, console.width - label - 2)
    column_s = (end_s - start_s) / num_columns
    seen: set[str] = set()
    for rank, marks in sorted(report.marks.items()):
        line = Text(f"{f'rank {rank}':<{label}}  ")
        ended_s = marks[-1].at_unix_s if marks and states.get(rank) in ("died", "failed", "finished") else None
        for name in _columns(marks, start_s, column_s, num_columns):
            letter, color = _LETTERS.get(name, (" ", "white"))
            at_s = start_s + (len(line) - label - 1) * column_s
            if ended_s is not None and at_s > ended_s + column_s:
                letter, color = _ENDED, "bright_black"
            elif name:
                seen.add(name)
            line.append(letter, style=color)
        console.print(line, no_wrap=True, crop=True)
    legend = [f"{_LETTERS[name][0]} {name}" for name in _LETTERS if name in seen]
    console.print(
        f"{'':<{label}}  the last {end_s - start_s:.1f} s, {column_s:.2g} s a column: {', '.join(legend)},"
        f" {_ENDED} has ended",
        highlight=False,
    )


def _columns(marks: list[TimedMark], start_s: float, column_s: float, num_columns: int) -> list[str]:
    """Returns the name of the phase at the end of each column; "" before the first mark."""
    phases = [mark for mark in marks if mark.kind == PHASE]
    times = [mark.at_unix_s for mark in phases]
    counts = [bisect_right(times, start_s + (column + 1) * column_s) for column in range(num_columns)]
    return [PHASES[phases[count - 1].code].name if count else "" for count in counts]
