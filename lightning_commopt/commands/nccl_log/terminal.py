"""A log of NCCL on the terminal: what it says, then what to do about it."""

from __future__ import annotations

from collections import Counter

from rich.console import Console

from lightning_commopt.commands.nccl_log.facts import Communicator, NcclLog
from lightning_commopt.commands.nccl_log.inspector import Matched
from lightning_commopt.commands.nccl_log.summary import (
    channels_of,
    extras_of,
    networks_of,
    paths_of,
    rings_of,
    versions_of,
)
from lightning_commopt.text.findings import Finding, print_findings
from lightning_commopt.text.formatting import count, list_some, number, numbers_text, ranks_text
from lightning_commopt.text.terminal import TextTable, print_text

_MAX_PAIRS = 6
_MAX_RINGS = 4
_MAX_RANKS = 16
_MAX_CHOICES = 12
_MAX_COMMUNICATORS = 4


def print_log(log: NcclLog, findings: list[Finding], console: Console) -> None:
    """Prints communicators, the tuner's choices and settings, then all findings, each with its evidence."""
    version = " and ".join(versions_of(log)) or "of unknown version"
    num_records = log.inspected.num_records
    measured = f" and {count(num_records, 'record')} of the Inspector" if num_records else ""
    lines = f"{count(log.num_lines, 'line')}{measured} in {count(len(log.files), 'file')}"
    print_text(f"NCCL {version}: {lines}", console, "bold")
    for file in log.silent_files:
        print_text(f"warning: {file} has no line of NCCL", console, "yellow")
    shown = sorted(log.communicators, key=lambda each: -len(each.all_members))[:_MAX_COMMUNICATORS]
    others = [each for each in log.communicators if each not in shown]
    for communicator in sorted(shown, key=lambda each: each.number):
        _print_communicator(communicator, console)
    if others:
        sizes = list_some([each.num_ranks or "?" for each in others], _MAX_CHOICES)
        print_text(f"{len(others)} more communicators, of {sizes} ranks: see --json", console)
    _print_rest(log, console)
    _print_choices(log, console)
    _print_inspected(log, console)
    _print_settings(log, console)
    console.print()
    if not findings:
        print_text("nothing is wrong, slow or unequal, as far as the log says", console, "green")
    print_findings(findings, console)


def _print_communicator(communicator: Communicator, console: Console) -> None:
    parts = [_size_text(communicator), _hosts_text(communicator)]
    if num_channels := channels_of(communicator):
        parts.append(count(num_channels, "channel"))
    if networks := networks_of(communicator):
        parts.append(f"network {' and '.join(networks)}")
    parts += [f"{name}: {value}" for name, value in extras_of(communicator).items()]
    console.print()
    name = f"communicator {communicator.number}"
    if communicator.count > 1:
        name = f"communicators without an id ({communicator.count} or more; which ranks belong together is unknown)"
    print_text(f"{name}: {', '.join(parts)}", console, "bold")
    for machine, ranks in communicator.machines.items():
        print_text(f"  {' '.join(filter(None, machine)) or 'host unknown'}: {ranks_text(ranks)}", console)
    _print_paths(communicator, console)
    rings = list(rings_of(communicator).items())
    for ring, channels in rings[:_MAX_RINGS]:
        order = " ".join(map(str, ring[:_MAX_RANKS])) + (" ..." if len(ring) > _MAX_RANKS else "")
        print_text(f"  ring on {_channels_text(channels)}: {order}", console)
    if len(rings) > _MAX_RINGS:
        print_text(f"  and {len(rings) - _MAX_RINGS} other rings", console)


def _print_rest(log: NcclLog, console: Console) -> None:
    """Prints where the processes are that name no communicator, and the ranks of which only nccl-tests says so."""
    hosts = Counter(member.process.host or "an unknown host" for member in log.rest.unknown)
    if hosts:
        shown = list_some([f"{number} on {host}" for host, number in hosts.items()], _MAX_PAIRS)
        nics = list(dict.fromkeys(name for member in log.rest.unknown for name in member.process.nics))
        parts = [shown, *(f"network {name}" for name in networks_of(log.rest))]
        parts += [f"NICs {list_some(nics, _MAX_PAIRS)}"] if nics else []
        print_text(f"processes that name no communicator: {', '.join(parts)}", console)
    if log.listed and not log.communicators:
        listed = Counter(host for host, *_ in log.listed.values())
        shown = list_some([f"{count(number, 'rank')} on {host}" for host, number in listed.items()], _MAX_PAIRS)
        print_text(f"nccl-tests lists {shown}", console)


def _size_text(communicator: Communicator) -> str:
    present, size = len(communicator.members), communicator.num_ranks
    if communicator.count > 1:
        return f"each of {count(size, 'rank') if size else f'at least {communicator.min_ranks} ranks'}"
    if size is None:
        if not present:
            return "ranks unknown"
        return f"{present} of at least {count(max(communicator.min_ranks, 1), 'rank')}"
    return count(size, "rank") if present == size else f"{present} of {count(size, 'rank')}"


def _hosts_text(communicator: Communicator) -> str:
    if communicator.num_nodes is not None:
        return count(communicator.num_nodes, "host")
    hosts = {member.process.machine for member in communicator.all_members if member.process.host}
    return f"{count(len(hosts), 'host')} or more" if hosts else "hosts unknown"


def _print_paths(communicator: Communicator, console: Console) -> None:
    table = TextTable("path", "where", "pairs (sender > receiver)", "channels")
    paths = paths_of(communicator)
    for path in paths:
        pairs = list_some([f"{sender} > {receiver}" for sender, receiver in path.pairs], _MAX_PAIRS)
        table.add_row(path.name, path.place, pairs, str(path.num_channels))
    if paths:
        console.print(table)


def _channels_text(channels: list[int]) -> str:
    return f"channel{'s' if len(channels) > 1 else ''} {numbers_text(channels)}"


def _print_choices(log: NcclLog, console: Console) -> None:
    shown = sorted(log.choices.most_common(_MAX_CHOICES), key=lambda item: item[0].num_bytes)
    rows = [[*map(str, (*choice, times))] for choice, times in shown]
    columns = ("operation", "bytes", "algorithm", "protocol", "channels", "times")
    _print_table("the tuner's choices", columns, rows, len(log.choices), console)


def _print_inspected(log: NcclLog, console: Console) -> None:
    numbers = {m.comm_id: each.number for each in log.communicators for m in each.all_members if m.comm_id}
    rows = [row._replace(name=str(numbers.get(row.name, row.name))) for row in log.inspected.rows()]
    _print_measured("communicator", rows, "measured by NCCL's Inspector (medians)", console)
    if log.inspected.num_dropped:
        print_text(f"the Inspector dropped {log.inspected.num_dropped} more collectives", console)
    _print_measured("in a step", log.matched, "matched with the steps of the run", console)


def _print_measured(first: str, measured: list[Matched], title: str, console: Console) -> None:
    columns = (first, "operation", "bytes", "algorithm", "protocol", "times", "bus GB/s")
    rows = [
        [name, *(str(each or "unknown") for each in kind[1:]), str(times), number(gb_per_s)]
        for name, kind, times, gb_per_s in measured[:_MAX_CHOICES]
    ]
    _print_table(title, columns, rows, len(measured), console)


def _print_table(title: str, columns: tuple[str, ...], rows: list[list[str]], num_rows: int, console: Console) -> None:
    if not rows:
        return
    table = TextTable(*columns)
    for row in rows:
        table.add_row(*row)
    console.print()
    print_text(title, console, "bold")
    console.print(table)
    if num_rows > len(rows):
        print_text(f"and {num_rows - len(rows)} more: see --json", console)


def _print_settings(log: NcclLog, console: Console) -> None:
    settings: dict[str, set[str]] = {}
    for process in log.processes:
        for name, fact in process.settings.items():
            settings.setdefault(name, set()).add(fact.value)
    if settings:
        shown = ", ".join(f"{name}={'|'.join(sorted(values))}" for name, values in sorted(settings.items()))
        console.print()
        print_text(f"environment: {shown}", console)
