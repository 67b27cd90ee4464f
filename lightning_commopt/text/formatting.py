"""Formats numbers with a few significant digits and a unit; groups and lists numbers and names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Hashable, Iterable
from itertools import groupby, islice
from typing import NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


# A terminal obeys these characters instead of showing them: C0 (except tab and line feed), DEL and C1, with which every
# escape sequence begins, and characters that reorder text or end a line in some programs. Surrogates cannot be encoded.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class Unit(NamedTuple):
    """A unit of a size in seconds or bytes."""

    name: str
    size: float

    def text(self, value: float) -> str:
        """Returns a value with its unit.

        >>> Unit("ms", 1e-3).text(0.01234)
        '12.3 ms'
        """
        return f"{number(value / self.size)} {self.name}"


def number(value: float, digits: int = 3, max_decimals: int = 99) -> str:
    """Returns a number with at least ``digits`` significant digits; a dash if it is not finite.

    It has at most ``max_decimals`` digits after the point, and is "0" if they would all be zero.

    >>> [number(value) for value in (1234.5, 12.345, 0.9996, 0.012345, 0.0, math.nan)]
    ['1234', '12.3', '1.00', '0.0123', '0', '-']
    >>> [number(value, max_decimals=4) for value in (0.012345, 0.0012345, 0.00001)]
    ['0.0123', '0.0012', '0']
    """
    if not math.isfinite(value):
        return "-"
    if abs(value) < 0.5 * 10**-max_decimals:
        return "0"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    return f"{value:.{min(max_decimals, max(0, digits - 1 - exponent))}f}"


def text_of(value: object, show: Callable[[object], str] = str) -> str:
    """Returns ``show(value)``; a placeholder if that raises, as it may for an exception of a user's own class."""
    try:
        return show(value)
    except Exception:
        return f"<{show.__name__}() failed>"


def percent(share: float) -> str:
    """Returns a share as a percentage.

    >>> percent(0.1226), percent(math.nan)
    ('12.3 %', '-')
    """
    return f"{100 * share:.1f} %" if math.isfinite(share) else "-"


def short_percent(share: float) -> str:
    """Returns a share, or a relative change without its sign, as a percentage with two significant digits.

    >>> short_percent(0.4286), short_percent(-0.0123), short_percent(0.00012)
    ('43 %', '1.2 %', '0.01 %')
    """
    return f"{number(100 * abs(share), digits=2, max_decimals=2)} %"


def count(num: int, noun: str) -> str:
    """Returns a number of things.

    >>> count(1, "rank"), count(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{num} {noun}" if num == 1 else f"{num} {noun}s"


def list_some(items: Collection[object], num_shown: int = 4) -> str:
    """Returns the first of some things, and the number of the others.

    >>> list_some("ab"), list_some(range(6), 3)
    ('a, b', '0, 1, 2 and 3 more')
    """
    more = len(items) - num_shown
    shown = ", ".join(map(str, islice(items, num_shown)))
    return f"{shown} and {more} more" if more > 0 else shown


def escape_controls(text: str) -> str:
    r"""Returns a text with control characters as escapes, so that a terminal shows them and does not obey them.

    It must be used to print or log any text from files or from other ranks. Escaping twice changes nothing.

    >>> escape_controls("café 中文")
    'café 中文'
    >>> print(escape_controls(chr(27) + "[2J" + chr(0x9B) + chr(0x202E)))
    \x1b[2J\x9b\u202e
    """
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def control_places(text: str) -> list[int]:
    """Returns the places where control characters begin and end; see `escape_controls`."""
    return [place for match in _CONTROLS.finditer(text) for place in match.span()]


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Returns the values of each key, both in the order of the pairs.

    >>> grouped([("a", 1), ("b", 2), ("a", 3)])
    {'a': [1, 3], 'b': [2]}
    """
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def runs_of(numbers: Iterable[int]) -> list[list[int]]:
    """Returns sorted numbers, grouped into runs without a gap.

    >>> runs_of([7, 0, 1, 2, 3])
    [[0, 1, 2, 3], [7]]
    """
    in_order = enumerate(sorted(set(numbers)))
    return [[number for _, number in run] for _, run in groupby(in_order, lambda pair: pair[1] - pair[0])]


def numbers_text(numbers: Iterable[int], num_shown: int = 8) -> str:
    """Returns numbers, three or more in a row as a range, and the number of numbers that are not shown.

    >>> numbers_text([0, 1, 2, 3, 7]), numbers_text([0, 2, 4, 5, 6], 2)
    ('0-3, 7', '0, 2 and 3 more')
    """
    runs = runs_of(numbers)
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs[:num_shown]]
    more = sum(map(len, runs[num_shown:]))
    return f"{', '.join(shown)}{f' and {more} more' if more else ''}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Returns a list of ranks in words.

    >>> ranks_text([3]), ranks_text([0, 1, 2, 3, 7])
    ('rank 3', 'ranks 0-3, 7')
    """
    shown = numbers_text(ranks)
    return f"rank {shown}" if shown.isdecimal() else f"ranks {shown}"


MILLISECONDS = Unit("ms", 1e-3)


def time_unit(longest_s: float) -> Unit:
    """Returns seconds or milliseconds, whichever suits the longest time."""
    return Unit("s", 1.0) if longest_s >= 2 else MILLISECONDS


def byte_unit(max_bytes: float) -> Unit:
    """Returns GB or MB, whichever suits the largest size."""
    return Unit("GB", 1e9) if max_bytes >= 2e9 else Unit("MB", 1e6)


def lasting_repr(value: object) -> str:
    """Returns the ``repr`` of an object without addresses, which differ in every process.

    That of an object whose class has no ``repr`` has its attributes.

    >>> lasting_repr(Unit("ms", 1e-3)), lasting_repr(lasting_repr)
    ("Unit(name='ms', size=0.001)", '<function lasting_repr>')
    """
    is_bare = type(value).__repr__ is object.__repr__
    text = f"{type(value).__qualname__}({getattr(value, '__dict__', '')})" if is_bare else repr(value)
    return re.sub(r" at 0x[0-9a-f]+", "", text)
