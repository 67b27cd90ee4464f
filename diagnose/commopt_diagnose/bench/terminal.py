"""Prints the result of a bench in nccl-tests' columns, and from which size on a comm hook pays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Console

from commopt_diagnose.bench.model import LinkModel
from commopt_diagnose.bench.result import BenchResult, Case, Row
from commopt_diagnose.bench.settings import size_text
from lightning_commopt.text.formatting import count, grouped, number
from lightning_commopt.text.terminal import TextTable, print_text

_SIZE = "{:>12}  {:>12}  {:>8}  {:>6}"
_TIMES = "  {:>10}  {:>6}  {:>7}  {:>7}  {:>6}"
_PLACES = {"out": "out of place", "in": "in place"}
_PEERS = "copies between GPUs, GB/s (row: from, column: to)"
_MISSING = ["-"] * 5
_CONDITIONS = {"world_size", "num_nodes", "devices", "num_cores", "backend", "versions", "started_at", "seconds"}
_CONDITIONS |= {"load_at_start", "load_at_end"}


def print_bench(result: BenchResult, console: Console) -> None:
    """Prints conditions, a table for each series, and conclusions.

    Tables are in nccl-tests' columns, which scripts parse, unless a terminal is too narrow for them.
    """
    for lines, tables in _parts(result):
        is_narrow = console.is_terminal and max(map(len, lines)) > console.width
        for table in tables if is_narrow else ():
            console.print(table)
        for line in () if is_narrow and tables else lines:
            print_text(line, console)


def _parts(result: BenchResult) -> Iterator[tuple[list[str], list[TextTable]]]:
    """Yields lines of the output, and tables that replace them in a narrow terminal."""
    yield [f"# {line}" for line in where_lines(result)], []
    for title, rows in _tables(result):
        yield ["#", f"# {title}"], []
        yield _table(rows), _narrow_tables(rows)
    yield ["#", *(f"# {line}" for line in _closing_lines(result))], []
    if result.peer_copies:
        yield [f"# {line}" for line in peer_lines(result)], [_peer_table(result.peer_copies)]


def where_lines(result: BenchResult) -> list[str]:
    """Returns the conditions of a result."""
    lines = condition_lines(result.where)
    if "num_repetitions" in result.settings:  # the model of a run has no repetitions
        repetitions = count(result.settings["num_repetitions"], "repetition")
        lines[-1] += f"; {repetitions}, interleaved: medians with their interval"
    return lines


def condition_lines(where: Mapping[str, Any]) -> list[str]:
    """Returns ``where`` of a result or a link model in words."""
    if "run" in where:
        return [f"run {where['run']}: buckets of {count(where['world_size'], 'rank')}, up to step {where['last_step']}"]
    if not where.keys() >= _CONDITIONS:
        return ["measured under conditions that the file does not contain"]
    ranks = f"{count(where['world_size'], 'rank')} on {count(where['num_nodes'], 'host')}"
    link = f", {where['link']} between them (network lab)" if where.get("link") else ""
    devices = f"{', '.join(where['devices'])}, {count(where['num_cores'], 'core')} a rank"
    return [
        f"commopt bench: {ranks}{link}, {where['backend']}, torch {where['versions']['torch']}",
        f"{devices}, {where['started_at']}, {where['seconds']} s",
        f"load average {where['load_at_start']:.1f} at the start, {where['load_at_end']:.1f} at the end",
    ]


def _tables(result: BenchResult) -> Iterator[tuple[str, list[Row]]]:
    """Yields title and rows of each table, in and out of place together."""
    cases = ((row.case, row) for row in result.rows)
    tables = grouped(((case.name, case.dtype, case.redop, case.load, case.scope), row) for case, row in cases)
    for rows in tables.values():
        first = rows[0].case
        ranks = f"{count(first.num_ranks, 'rank')}{'' if first.scope == 'all' else ' in a group'}"
        yield f"{first.label.removesuffix(', out of place')} ({ranks})", rows


def _table(rows: list[Row]) -> list[str]:
    places = _places(rows)
    by_size: dict[int, dict[str, Row]] = {}
    for row in rows:
        by_size.setdefault(row.case.size_bytes, {})[row.case.place] = row
    heading = _SIZE.format("size", "count", "type", "redop")
    times = _TIMES.format("time", "±", "algbw", "busbw", "#wrong")
    units = _TIMES.format("(us)", "(%)", "(GB/s)", "(GB/s)", "")
    above = " " * len(heading) + "".join(_PLACES[place].center(len(times)) for place in places)
    headings = (
        above.rstrip(),
        heading + times * len(places),
        _SIZE.format("(B)", "(elements)", "", "") + units * len(places),
    )
    lines = [f"#{line[1:]}" for line in headings]
    for size_bytes, by_place in by_size.items():
        case = next(iter(by_place.values())).case
        cells = [_cells(by_place.get(place)) for place in places]
        lines.append(_SIZE.format(size_bytes, case.count, case.dtype, case.redop) + "".join(cells))
    return lines


def _narrow_tables(rows: list[Row]) -> list[TextTable]:
    """Returns one table for in place and one for out of place, with failures below."""
    headings = "size\n(B)", "count", "type", "redop", "time\n(us)", "±\n(%)", "algbw\n(GB/s)", "busbw\n(GB/s)", "#wrong"
    tables = []
    for place in _places(rows):
        shown = [row for row in rows if row.case.place == place]
        failed = [f"{row.case.size_bytes} B failed: {row.error}" for row in shown if row.error is not None]
        table = TextTable(*headings, numbers=headings, title=_PLACES[place], caption="\n".join(failed))
        for row in shown:
            case, times = row.case, _MISSING if row.error is not None else _times(row)
            table.add_row(str(case.size_bytes), str(case.count), case.dtype, case.redop, *times)
        tables.append(table)
    return tables


def _places(rows: list[Row]) -> list[str]:
    return [place for place in _PLACES if any(row.case.place == place for row in rows)]


def _cells(row: Row | None) -> str:
    if row is not None and row.error is not None:
        return f"  failed: {row.error}"
    return _TIMES.format(*(_MISSING if row is None else _times(row)))


def _times(row: Row) -> list[str]:
    half = (row.time_s.high - row.time_s.low) / 2 / row.time_s.median
    wrong = "N/A" if row.num_wrong is None else str(row.num_wrong)
    time_us = row.time_s.median * 1e6
    shown = f"{time_us:.2f}" if time_us < 1e3 else f"{time_us:.1f}" if time_us < 1e5 else f"{time_us:.0f}"
    return [shown, f"{100 * half:.1f}", _gb(row.algbw), _gb(row.busbw), wrong]


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.2f}" if rate >= 1e10 else f"{rate / 1e9:.4f}"


def _closing_lines(result: BenchResult) -> list[str]:
    wrong = f"{result.num_wrong} {'FAILED' if result.num_wrong else 'OK'}"
    is_checked = any(row.num_wrong is not None for row in result.rows)
    lines = [f"Out of bounds values : {wrong if is_checked else 'not checked'}"]
    collectives = [row for row in result.measured if row.case.operation != "comm_hook"]
    if collectives:
        average = sum(row.busbw for row in collectives) / len(collectives)
        lines.append(f"Avg bus bandwidth    : {_gb(average)} GB/s")
    return [*lines, *against_link(result), *payoffs(result)]


def against_link(result: BenchResult) -> list[str]:
    """Returns a line that compares the largest messages with the link's rate; empty if either is unknown."""
    rate = result.link_bytes_per_s
    if rate is None:
        return []
    best: dict[str, str] = {}
    for rows in result.by_series().values():
        case = rows[-1].case
        if case.operation != "comm_hook" and case.load == "idle" and case.scope == "all":
            best.setdefault(case.name, f"{case.name} {100 * rows[-1].busbw / rate:.1f} %")
    if not best:
        return []
    largest = size_text(max(row.case.size_bytes for row in result.measured))
    return [f"busbw at {largest} over the link's rate, {rate / 1e9:g} GB/s each way: {', '.join(best.values())}"]


def peer_lines(result: BenchResult) -> list[str]:
    """Returns the rates between all pairs of GPUs as a matrix; empty without GPUs."""
    if not result.peer_copies:
        return []
    lines = [_PEERS, "     " + "".join(f"{to:>8}" for to in range(len(result.peer_copies)))]
    for source, rates in enumerate(result.peer_copies):
        lines.append(f"{source:>4} " + "".join(f"{cell:>8}" for cell in _peer_cells(rates)))
    return lines


def _peer_table(copies: Sequence[Sequence[float | None]]) -> TextTable:
    headings = ["from", *(f"to {to}" for to in range(len(copies)))]
    table = TextTable(*headings, numbers=headings, title=_PEERS)
    for source, rates in enumerate(copies):
        table.add_row(str(source), *_peer_cells(rates))
    return table


def _peer_cells(rates: Sequence[float | None]) -> list[str]:
    return ["-" if rate is None else f"{rate / 1e9:.1f}" for rate in rates]


def predictions(model: LinkModel, sizes_bytes: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the prediction of each curve for each size, in JSON types."""
    return [
        {"series": curve.case.label, "size_bytes": size, **vars(curve.predict(size))}
        for curve in model.curves
        for size in sizes_bytes
    ]


def model_lines(model: LinkModel, sizes_bytes: Sequence[int]) -> list[str]:
    """Returns a line for each curve, and one for each prediction."""
    lines = ["# link model"]
    for curve in model.curves:
        lines.append(f"#   {curve.text}")
        for size in sizes_bytes:
            prediction = curve.predict(size)
            note = "; extrapolated" if prediction.is_extrapolated else ""
            ends = f"{number(1e3 * prediction.low_s)} to {number(1e3 * prediction.high_s)}"
            lines.append(f"#     {size_text(size)}: {number(1e3 * prediction.time_s)} ms ({ends}){note}")
    return lines


def payoffs(result: BenchResult) -> list[str]:
    """Returns a sentence on each comm hook: from which measured size on it is faster than an all-reduce beyond noise.

    It is compared with the all-reduce of the same dtype, load and sizes, where both were measured.
    """
    series = result.by_series()
    sentences = []
    for rows in series.values():
        case = rows[0].case
        if case.operation != "comm_hook":
            continue
        exact = next(filter(partial(_is_reference, hook=case), series.values()), [])
        by_size = {row.case.size_bytes: row for row in exact}
        pairs = [(row, by_size[row.case.size_bytes]) for row in rows if row.case.size_bytes in by_size]
        if pairs:
            sentences.append(_payoff(case.label.replace(", under compute", " under compute"), pairs))
    return sentences


def _is_reference(rows: list[Row], hook: Case) -> bool:
    case = rows[0].case
    is_plain = (case.operation, case.place, case.redop) == ("all_reduce", "in", "sum")
    return is_plain and (case.dtype, case.load, case.scope) == (hook.dtype, hook.load, hook.scope)


def _payoff(name: str, pairs: list[tuple[Row, Row]]) -> str:
    pays_from: int | None = None
    for hook, exact in reversed(pairs):
        if hook.time_s.high >= exact.time_s.low:
            break
        pays_from = hook.case.size_bytes
    largest = pairs[-1][0].case.size_bytes
    ratio = pairs[-1][1].time_s.median / pairs[-1][0].time_s.median
    at_largest = f"{number(ratio)} times as fast as all_reduce at {size_text(largest)}"
    if pays_from is None and ratio > 1:
        return f"{name} is {at_largest}, which may be noise; more --repetitions show whether it pays."
    if pays_from is None:
        return f"{name} does not pay on this link up to {size_text(largest)}; it is {at_largest}."
    return f"{name} pays on this link from {size_text(pays_from)} on; it is {at_largest}."
