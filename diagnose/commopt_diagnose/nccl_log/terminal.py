"""Prints a log of NCCL: how ranks communicate, then findings with advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console

from commopt_diagnose.findings import print_findings
from commopt_diagnose.nccl_log.communicators import Communicator, NcclLog
from commopt_diagnose.nccl_log.inspector import Matched
from commopt_diagnose.nccl_log.summary import channels_of, extras_of, networks_of, paths_of, rings_of, versions_of
from lightning_commopt.text.findings import Finding
from lightning_commopt.text.formatting import count, grouped, list_some, number, numbers_text, ranks_text
from lightning_commopt.text.terminal import TextTable, print_text

_MAX_PAIRS = 6
_MAX_RINGS = 4
_MAX_RANKS = 16
_MAX_ROWS = 12
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
    for file, error in log.damaged_files.items():
        print_text(f"warning: {file} is cut or damaged, and was read up to there: {error}", console, "yellow")
    largest = sorted(log.communicators, key=lambda communicator: -len(communicator.all_members))
    for communicator in sorted(largest[:_MAX_COMMUNICATORS], key=lambda communicator: communicator.number):
        _print_communicator(communicator, console)
    if others := [communicator for communicator in log.communicators if communicator in largest[_MAX_COMMUNICATORS:]]:
        sizes = list_some([communicator.num_ranks or "?" for communicator in others], _MAX_ROWS)
        print_text(f"{len(others)} more communicators, of {sizes} ranks: see --json", console)
    _print_rest(log, console)
    choices = sorted(log.choices.most_common(_MAX_ROWS), key=lambda item: item[0].num_bytes)
    columns = ("operation", "bytes", "algorithm", "protocol", "channels", "times")
    _print_table(columns, [[*choice, n] for choice, n in choices], console, "the tuner's choices", len(log.choices))
    if log.num_choices_left_out:
        left_out = count(log.num_choices_left_out, "line")
        print_text(
            f"{left_out} of the tuner are left out: there are more than {len(log.choices)} different choices", console
        )
    _print_inspected(log, console)
    settings = grouped((name, fact.value) for process in log.processes for name, fact in process.settings.items())
    if settings:
        shown = ", ".join(f"{name}={'|'.join(sorted(set(values)))}" for name, values in sorted(settings.items()))
        console.print()
        print_text(f"environment: {shown}", console)
    console.print()
    if not findings:
        print_text("nothing is wrong, slow or unequal, as far as the log shows", console, "green")
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
    rows: list[list[object]] = []
    for path in paths_of(communicator):
        pairs = [f"{sender} > {receiver}" for sender, receiver in path.pairs]
        rows.append([path.name, path.place, list_some(pairs, _MAX_PAIRS), path.num_channels])
    _print_table(("path", "where", "pairs (sender > receiver)", "channels"), rows, console)
    rings = list(rings_of(communicator).items())
    for ring, channels in rings[:_MAX_RINGS]:
        order = " ".join(map(str, ring[:_MAX_RANKS])) + (" ..." if len(ring) > _MAX_RANKS else "")
        name = "channel" if len(channels) == 1 else "channels"
        print_text(f"  ring on {name} {numbers_text(channels)}: {order}", console)
    if len(rings) > _MAX_RINGS:
        print_text(f"  and {len(rings) - _MAX_RINGS} other rings", console)


def _size_text(communicator: Communicator) -> str:
    present, size = len(communicator.members), communicator.num_ranks
    if communicator.count > 1:
        return f"each of {count(size, 'rank') if size else f'at least {communicator.min_ranks} ranks'}"
    if not present and size:
        return f"{count(size, 'rank')}, which of them is unknown"
    if size is None:
        return f"{present} of at least {count(communicator.min_ranks, 'rank')}" if present else "ranks unknown"
    return count(size, "rank") if present == size else f"{present} of {count(size, 'rank')}"


def _hosts_text(communicator: Communicator) -> str:
    hosts = {process.machine for process in communicator.processes if process.host}
    if len(hosts) > 1 and any(connection.is_multi_node_nvlink for connection in communicator.connections):
        return f"{count(len(hosts), 'host')}, which NVLink joins"
    if communicator.num_nodes is not None:
        return count(communicator.num_nodes, "host")
    return f"{count(len(hosts), 'host')} or more" if hosts else "hosts unknown"


def _print_rest(log: NcclLog, console: Console) -> None:
    """Prints the hosts of processes that name no communicator, and of ranks that only nccl-tests lists."""
    rest = log.rest()
    if processes := rest.processes:
        hosts = Counter(process.host or "an unknown host" for process in processes)
        nics = list(dict.fromkeys(name for process in processes for name in process.nics))
        parts = [list_some([f"{number} on {host}" for host, number in hosts.items()], _MAX_PAIRS)]
        parts += [f"network {name}" for name in networks_of(rest)]
        parts += [f"NICs {list_some(nics, _MAX_PAIRS)}"] if nics else []
        print_text(f"processes that name no communicator: {', '.join(parts)}", console)
    if log.listed and not log.communicators:
        listed = Counter(host for host, *_ in log.listed.values())
        shown = list_some([f"{count(number, 'rank')} on {host}" for host, number in listed.items()], _MAX_PAIRS)
        print_text(f"nccl-tests lists {shown}", console)


def _print_inspected(log: NcclLog, console: Console) -> None:
    numbers = {m.comm_id: known.number for known in log.communicators for m in known.all_members if m.comm_id}
    rows = [row._replace(name=str(numbers.get(row.name, row.name))) for row in log.inspected.rows()]
    _print_measured("communicator", rows, "measured by NCCL's Inspector (medians)", console)
    if log.inspected.num_dropped:
        print_text(f"the Inspector dropped {log.inspected.num_dropped} more collectives", console)
    _print_measured("in a step", log.matched, "matched with the steps of the run", console)


def _print_measured(first: str, measured: list[Matched], title: str, console: Console) -> None:
    columns = (first, "operation", "bytes", "algorithm", "protocol", "times", "bus GB/s")
    rows = [
        [name, *(value or "unknown" for value in kind[1:]), times, number(gb_per_s)]
        for name, kind, times, gb_per_s in measured[:_MAX_ROWS]
    ]
    _print_table(columns, rows, console, title, len(measured))


def _print_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], console: Console, title: str = "", num_rows: int = 0
) -> None:
    """Prints the first rows of a table below its title, and how many more there are."""
    if not rows:
        return
    table = TextTable(*columns)
    for row in rows:
        table.add_row(*map(str, row))
    if title:
        console.print()
        print_text(title, console, "bold")
    console.print(table)
    if num_rows > len(rows):
        print_text(f"and {num_rows - len(rows)} more: see --json", console)
