"""Finds the size from which a comm hook is faster than an all-reduce on a link."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from lightning_commopt.measure.link.bench_result import BenchResult, Case, Row
from lightning_commopt.measure.link.sizes import size_text
from lightning_commopt.text.formatting import number


@dataclass(frozen=True, kw_only=True)
class Payoff:
    """Whether a comm hook pays.

    Attributes:
        name: of the series.
        from_bytes: the smallest measured size from which on it is faster beyond noise; None if there is none.
        ratio_at_largest: speed-up at the largest size.
        text: the same as a sentence.
    """

    name: str
    from_bytes: int | None
    ratio_at_largest: float
    text: str


def payoffs(result: BenchResult) -> list[Payoff]:
    """Compares each comm hook with the all-reduce of the same dtype, load and sizes, where both were measured."""
    series = result.by_series()
    found = []
    for rows in series.values():
        case = rows[0].case
        if case.operation != "comm_hook":
            continue
        exact = next(filter(partial(_is_reference, hook=case), series.values()), [])
        by_size = {row.case.size_bytes: row for row in exact}
        pairs = [(row, by_size[row.case.size_bytes]) for row in rows if row.case.size_bytes in by_size]
        if pairs:
            found.append(_payoff(case.label.replace(", under compute", " under compute"), pairs))
    return found


def _is_reference(rows: list[Row], hook: Case) -> bool:
    case = rows[0].case
    is_plain = (case.operation, case.place, case.redop) == ("all_reduce", "in", "sum")
    return is_plain and (case.dtype, case.load, case.scope) == (hook.dtype, hook.load, hook.scope)


def _payoff(name: str, pairs: list[tuple[Row, Row]]) -> Payoff:
    pays_from: int | None = None
    for hook, exact in reversed(pairs):
        if hook.time_s.high >= exact.time_s.low:
            break
        pays_from = hook.case.size_bytes
    largest = pairs[-1][0].case.size_bytes
    ratio = pairs[-1][1].time_s.median / pairs[-1][0].time_s.median
    at_largest = f"{number(ratio)} times as fast as all_reduce at {size_text(largest)}"
    if pays_from is not None:
        text = f"{name} pays on this link from {size_text(pays_from)} on; it is {at_largest}."
    else:
        text = f"{name} does not pay on this link up to {size_text(largest)}; it is {at_largest}."
    return Payoff(name=name, from_bytes=pays_from, ratio_at_largest=ratio, text=text)
