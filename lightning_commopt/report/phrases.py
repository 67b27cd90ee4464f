"""Numbers in words, with as many digits as their noise leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lightning_commopt.report.intervals import MIN_VALUES_OF_AN_INTERVAL
from lightning_commopt.report.model import Interval
from lightning_commopt.text.formatting import number

TIMES = "\N{MULTIPLICATION SIGN}"
_TIMES_FROM = 2.0
_MAX_NAMES = 3


def in_quotes(name: str) -> str:
    """Returns a setting's name for a sentence, as it may have commas."""
    return f'"{name}"'


def join_names(names: Sequence[str]) -> str:
    """Returns the first few names, and the number of the others.

    >>> join_names(["a", "b"]), join_names(["a", "b", "c", "d", "e"])
    ('"a" and "b"', '"a", "b" and 3 more')
    """
    shown = [in_quotes(name) for name in (names if len(names) <= _MAX_NAMES else names[: _MAX_NAMES - 1])]
    if len(shown) < len(names):
        return f"{', '.join(shown)} and {len(names) - len(shown)} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def speedup_in_words(ratio: Interval, than: str) -> str:
    """Returns how much faster or slower a ratio of throughputs is.

    >>> speedup_in_words(Interval(median=1.654, low=1.58, high=1.71, num_values=3), "it")
    '65 % faster than it (58 to 71 % in 3 repetitions)'
    >>> speedup_in_words(Interval(median=2.31, low=None, high=None, num_values=1), "it")
    '2.3 times as fast as it'
    """
    if ratio.median >= _TIMES_FROM:
        return f"{ratio.median:.1f} times as fast as {than}{_ends(ratio, lambda value: f'{value:.1f}')}"
    is_faster = ratio.median >= 1
    if ratio.low is None or ratio.high is None:
        decimals = 0 if abs(ratio.median - 1) > 0.0995 else 1
    else:
        decimals = 0 if ratio.high - ratio.low >= 0.02 else 1

    def percent(value: float) -> str:
        change = 100 * (value - 1) if is_faster else 100 * (1 - value)
        return f"{round(change, decimals) + 0.0:.{decimals}f}"  # 0.0 turns -0 into 0

    return f"{percent(ratio.median)} % {'faster' if is_faster else 'slower'} than {than}{_ends(ratio, percent, ' %')}"


def kind_of_interval(interval: Interval) -> str:
    """Returns what the ends of an interval are.

    >>> kind_of_interval(Interval(median=2, low=1, high=3, num_values=5))
    'range of 5 repetitions'
    """
    is_range = interval.num_values < MIN_VALUES_OF_AN_INTERVAL
    return f"range of {interval.num_values} repetitions" if is_range else "95 % interval"


def kinds_of_intervals(intervals: Iterable[Interval | None]) -> str:
    """Returns what the ends of several intervals are; empty if none has ends."""
    counts = [interval.num_values for interval in intervals if interval is not None and interval.low is not None]
    if not counts or min(counts) >= MIN_VALUES_OF_AN_INTERVAL:
        return "95 % intervals" if counts else ""
    ranges = f"ranges of {min(counts)}" if min(counts) == max(counts) else f"ranges of {min(counts)} to {max(counts)}"
    if max(counts) < MIN_VALUES_OF_AN_INTERVAL:
        return f"{ranges} repetitions"
    return f"95 % intervals, or ranges of less than {MIN_VALUES_OF_AN_INTERVAL} repetitions"


def spread_text(interval: Interval, scale: float = 1.0, digits: int = 3) -> str:
    """Returns the ends of an interval; empty if it has none.

    >>> spread_text(Interval(median=2, low=1.5, high=2.25, num_values=5))
    '1.50 to 2.25'
    """
    if interval.low is None or interval.high is None:
        return ""
    return f"{number(interval.low * scale, digits)} to {number(interval.high * scale, digits)}"


def _ends(ratio: Interval, shown: Callable[[float], str], unit: str = "") -> str:
    if ratio.low is None or ratio.high is None:
        return ""
    low, high = sorted([shown(ratio.low), shown(ratio.high)], key=float)
    is_range = ratio.num_values < MIN_VALUES_OF_AN_INTERVAL
    if low == high:
        return f" (in all {ratio.num_values} repetitions)" if is_range else ""
    span = f"{low} to {high}{unit}"
    return f" ({span} in {ratio.num_values} repetitions)" if is_range else f" (95 % interval {span})"
