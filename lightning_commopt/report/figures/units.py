"""Numbers as a reader wants them: three or four digits that mean something, and a unit."""

from __future__ import annotations

import math
from typing import NamedTuple

from lightning_commopt.report.model import Interval

TIMES = "\N{MULTIPLICATION SIGN}"


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


def number(value: float, digits: int = 3) -> str:
    """Returns a number with so many significant digits; those before the point are all kept.

    >>> [number(value) for value in (0.012345, 1.2345, 123.45, 12345.6, 0.0, float("nan"))]
    ['0.0123', '1.23', '123', '12,346', '0', '-']
    """
    if not math.isfinite(value):
        return "-"
    if not value:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def percent(share: float) -> str:
    """Returns a share as a percentage that no line is broken in.

    >>> percent(0.1226).replace("\N{NO-BREAK SPACE}", " ")
    '12.3 %'
    """
    return f"{share * 100:.1f}\N{NO-BREAK SPACE}%"


def spread_text(interval: Interval, scale: float = 1.0, digits: int = 3) -> str:
    """Returns the ends of an interval, or nothing where there is none.

    >>> spread_text(Interval(median=2, low=1.5, high=2.25, num_values=5))
    '1.50 to 2.25'
    """
    if interval.low is None or interval.high is None:
        return ""
    return f"{number(interval.low * scale, digits)} to {number(interval.high * scale, digits)}"


def time_unit(longest_s: float) -> Unit:
    """Returns seconds or milliseconds, whichever suits the longest of some times."""
    return Unit("s", 1.0) if longest_s >= 2 else Unit("ms", 1e-3)


def byte_unit(most_bytes: float) -> Unit:
    """Returns GB or MB, whichever suits the most of some bytes."""
    return Unit("GB", 1e9) if most_bytes >= 2e9 else Unit("MB", 1e6)
