"""The exposed share of a step: the one definition behind the table, loggers, files, the verdict and the report.

Of one run it is the exposed time of all steps and ranks over the time of all steps: a ratio of sums, so that the shares
of the parts of a step add up to 1. Of several runs it is the median of their shares: what slows a whole run down, such
as a busy machine, cancels within each ratio, and one bad run does not move the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple


class StepParts(NamedTuple):
    """A step in three parts: computing alone, computing while communicating, communicating alone."""

    computing_s: float
    hidden_s: float
    exposed_s: float


def exposed_share(runs: Sequence[Mapping[str, float]]) -> float:
    """Returns the share of a step that waits for communication, 0 to 1; NaN if no run has steps.

    >>> exposed_share([{"step_s": 0.1, "exposed_s": 0.02}, {"step_s": 0.4, "exposed_s": 0.04}])
    0.15

    Args:
        runs: ``step_s`` and ``exposed_s`` of each run, as sums or as means over its steps and ranks.
    """
    return _median_share(runs, [run["exposed_s"] for run in runs])


def step_parts(runs: Sequence[Mapping[str, float]]) -> StepParts:
    """Splits the median step of some runs by the medians of their shares; parts are NaN if no run has steps.

    >>> step_parts([{"step_s": 0.5, "comm_s": 0.25, "exposed_s": 0.125}])
    StepParts(computing_s=0.25, hidden_s=0.125, exposed_s=0.125)

    Args:
        runs: ``step_s``, ``comm_s`` and ``exposed_s`` of each run, as `Steps.statistics` gives them.

    Returns:
        The parts; ``exposed_s`` is `exposed_share` of the median step.
    """
    steps_s = [run["step_s"] for run in runs if run["step_s"] > 0]
    step_s = median(steps_s) if steps_s else math.nan
    exposed = exposed_share(runs)
    hidden = min(_median_share(runs, [run["comm_s"] - run["exposed_s"] for run in runs]), 1 - exposed)
    return StepParts(computing_s=step_s * (1 - exposed - hidden), hidden_s=step_s * hidden, exposed_s=step_s * exposed)


def share_of_step(part_s: float, step_s: float) -> float:
    """Returns a part of a step's time as a share of it; NaN without steps."""
    return part_s / step_s if step_s > 0 else math.nan


def _median_share(runs: Sequence[Mapping[str, float]], parts_s: Sequence[float]) -> float:
    shares = [share_of_step(part_s, run["step_s"]) for run, part_s in zip(runs, parts_s, strict=True)]
    return median([share for share in shares if not math.isnan(share)] or [math.nan])
