"""Numbers as people read them: three or four digits that mean something, and a unit."""

from __future__ import annotations

import math
from typing import NamedTuple


class Unit(NamedTuple):
    """A unit to show values in.

    Attributes:
        name: behind the number.
        size: of one, in seconds or bytes.
    """

    name: str
    size: float

    def text(self, value: float) -> str:
        """Returns a number with the unit behind it.

        >>> Unit("ms", 1e-3).text(0.01234)
        '12.3 ms'
        """
        return f"{number(value / self.size)} {self.name}"


def number(value: float, digits: int = 3, most_decimals: int = 99) -> str:
    """Returns a number with so many significant digits; those before its point are all kept.

    Args:
        value: a dash stands for what is not finite.
        digits: that mean something.
        most_decimals: behind the point; what is nothing but zeros then is "0".

    >>> [number(value) for value in (1234.5, 12.345, 0.9996, 0.012345, 0.0, math.nan)]
    ['1234', '12.3', '1.00', '0.0123', '0', '-']
    >>> [number(value, most_decimals=4) for value in (0.012345, 0.0012345, 0.00001)]
    ['0.0123', '0.0012', '0']
    """
    if not math.isfinite(value):
        return "-"
    if abs(value) < 0.5 * 10**-most_decimals:
        return "0"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])
    return f"{value:.{min(most_decimals, max(0, digits - 1 - exponent))}f}"


def percent(share: float) -> str:
    """Returns a share as a percentage.

    >>> percent(0.1226), percent(math.nan)
    ('12.3 %', '-')
    """
    return f"{100 * share:.1f} %" if math.isfinite(share) else "-"


def short_percent(share: float) -> str:
    """Returns a share, or a relative change without its sign, with two digits that mean something.

    >>> short_percent(0.4286), short_percent(-0.0123), short_percent(0.00012)
    ('43 %', '1.2 %', '0.01 %')
    """
    return f"{number(100 * abs(share), digits=2, most_decimals=2)} %"


def count(num: int, thing: str) -> str:
    """Returns a number of things.

    >>> count(1, "rank"), count(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{num} {thing}" if num == 1 else f"{num} {thing}s"


def megabytes(num_bytes: float) -> str:
    """Returns a number of MB.

    >>> megabytes(1.75e6)
    '1.75'
    """
    return number(num_bytes / 1e6)


MILLISECONDS = Unit("ms", 1e-3)


def time_unit(longest_s: float) -> Unit:
    """Returns seconds or milliseconds, whichever suits the longest of some times."""
    return Unit("s", 1.0) if longest_s >= 2 else MILLISECONDS


def byte_unit(most_bytes: float) -> Unit:
    """Returns GB or MB, whichever suits the most of some bytes."""
    return Unit("GB", 1e9) if most_bytes >= 2e9 else Unit("MB", 1e6)
