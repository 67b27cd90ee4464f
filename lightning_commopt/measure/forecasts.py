"""Puts predicted speed-ups into words: which settings are worth trying, and which compressor is not.

A plan is recommended for its speed if it is expected to save at least 5 % of a step, and the whole interval of its
speed-up is above 1. No predicted speed-up exceeds the one that hiding all communication would give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_commopt.measure.plain import check_numbers, errors_naming, from_plain, read_object
from lightning_commopt.measure.runs.files import PREDICTION_FILE
from lightning_commopt.measure.statistics import ratio
from lightning_commopt.text.formatting import number

MIN_SAVED_SHARE = 0.05
"""Minimum share of a step that a change of settings must save to be recommended."""

_PARAMETERWISE = ("NaiveDP", "InterleavedDP")
_MIN_LOSSY_ERROR = 0.1  # error bound above which the final metric may differ
# A lossless plan may cost this share of a step and still be recommended if communication is hidden anyway.
_MAX_LOSSLESS_COST = 0.02


def speedup(step_s: float, saved_s: float) -> float:
    """Returns how many times as fast training would be if each step saved ``saved_s``; NaN if that is unknown."""
    return ratio(step_s, step_s - saved_s)


class Forecast(NamedTuple):
    """The predicted median step with another setting."""

    setting: str  # what a user would write, such as ``comm_hook="int8"``
    is_lossy: bool  # whether the setting has a compressor that changes gradients
    error_bound: float  # error bound of one averaged gradient, see `Claims`
    step_s: float  # predicted time for the number of samples that a step has now
    low_s: float  # lower end of the 95 % interval
    high_s: float  # upper end of the 95 % interval
    present_s: float  # median of the last steps, with the present settings
    note: str = ""  # what the setting changes besides the speed; empty if nothing
    is_bounded: bool = True  # whether it saves at most the communication that a step waits for

    def speedups(self, bound: float = math.inf) -> tuple[float, float, float]:
        """Returns how many times as fast it is as now: expected, lower and upper end, none of them above ``bound``.

        >>> Forecast('comm_hook="int8"', True, 0.02, 0.5, 0.4, 0.625, 1.0).speedups(2.2)
        (2.0, 1.6, 2.2)
        """
        expected, low, high = (self.present_s / seconds for seconds in (self.step_s, self.high_s, self.low_s))
        return min(expected, bound), min(low, bound), min(high, bound)


def read_forecasts(run_dir: Path) -> Sequence[Forecast]:
    """Returns the forecasts of a run, none if its fit has not ended.

    Raises:
        ValueError: the file holds something else.
    """
    path = run_dir / PREDICTION_FILE
    if not path.exists():
        return ()
    plain = read_object(path, "result of commopt prediction")
    with errors_naming(path):
        check_numbers(plain["forecasts"], "forecasts")
        forecasts = [from_plain(Forecast, forecast) for forecast in plain["forecasts"]]
        for forecast in forecasts:
            if not 0 < forecast.low_s <= forecast.step_s <= forecast.high_s:
                raise ValueError(f"a forecast has no step time: {forecast.low_s}, {forecast.step_s}, {forecast.high_s}")
    return forecasts


class Present(NamedTuple):
    """The present run, with which forecasts are compared."""

    step_s: float  # mean over steps
    exposed_s: float  # mean over steps
    comm_hook: str  # name of the comm hook that averages the gradients
    is_lossy: bool  # whether the comm hook changes gradients

    def speedups(self, forecast: Forecast) -> tuple[float, float, float]:
        bound = speedup(self.step_s, self.exposed_s)
        return forecast.speedups(math.inf if math.isnan(bound) or not forecast.is_bounded else bound)

    def is_faster(self, forecast: Forecast) -> bool:
        """Returns whether a setting saves enough to be worth the effort, and is faster in its whole interval."""
        expected, low, _ = self.speedups(forecast)
        return low > 1 and 1 - 1 / expected >= MIN_SAVED_SHARE


def shorter_steps(
    present: Present, forecasts: Sequence[Forecast], options: str = "comm_hook= or bucket_cap_mb="
) -> list[str]:
    """Recommends settings that shorten the step, the exact ones first; a less exact one only if it saves more.

    ``options`` are named if none of them is clearly faster.
    """
    if present.comm_hook in _PARAMETERWISE:
        return ["strategy=CommOptDDP(), lossless: it sends gradients in buckets, not one by one."]
    recommendations, best = [], 1.0
    for forecast in filter(present.is_faster, forecasts):
        expected = present.speedups(forecast)[0]
        if forecast.note:
            recommendations.append(_recommendation(present, forecast))
        elif 1 - best / expected >= MIN_SAVED_SHARE:
            best = expected
            recommendations.append(_recommendation(present, forecast))
    if forecasts and not recommendations and present.exposed_s >= MIN_SAVED_SHARE * present.step_s:
        recommendations = [_none_is_faster(options)]
    return [*_if_compression_costs_more(present, forecasts), *recommendations]


def shorter_sharded_steps(present: Present, forecasts: Sequence[Forecast]) -> list[str]:
    """Recommends settings that shorten a step of FSDP2, as `shorter_steps` does for DDP."""
    options = "comm_hook= or param_hook="
    return shorter_steps(present, forecasts, options) or [_none_is_faster(options)]


def _none_is_faster(options: str) -> str:
    return f"No {options} is clearly faster: no predicted speed-up has an interval that is above 1 as a whole."


def _if_compression_costs_more(present: Present, forecasts: Sequence[Forecast]) -> list[str]:
    """Returns a sentence if the present compressor takes more time than it saves; nothing otherwise."""
    if not present.is_lossy or not any(
        _is_uncompressed(forecast) and present.is_faster(forecast) for forecast in forecasts
    ):
        return []
    return [f'comm_hook="{present.comm_hook}" takes more time than it saves on this link.']


def exact_alternative(present: Present, forecasts: Sequence[Forecast]) -> list[str]:
    """Recommends an exact setting in place of a lossy one that saves nothing because communication is hidden."""
    for forecast in filter(_is_uncompressed, forecasts):
        expected, low, _ = forecast.speedups()
        if present.is_lossy and expected > 1 - _MAX_LOSSLESS_COST:
            than_now = "faster" if low > 1 else "about as fast"
            return [f'{forecast.setting}, lossless: expected to be {than_now}, and "{present.comm_hook}" is lossy.']
    return []


def _is_uncompressed(forecast: Forecast) -> bool:
    return forecast.setting.startswith('comm_hook="none"')


def _recommendation(present: Present, forecast: Forecast) -> str:
    expected, low, high = present.speedups(forecast)
    # Where even the lower end exceeds what the step waits for, an interval would claim to be exact.
    speedup = f"{expected:.2f} ({low:.2f} to {high:.2f})" if low < high else f"at most {high:.2f}"
    if forecast.note:
        return f"{forecast.setting}, exact: {speedup} times as fast; {forecast.note}."
    is_exact = _is_uncompressed(forecast) or not (forecast.is_lossy or present.is_lossy)
    kind = ", lossy" if forecast.is_lossy else ", lossless" if is_exact else ""
    compare = "" if forecast.error_bound <= _MIN_LOSSY_ERROR else " Compare the final metric as well."
    return f"{forecast.setting}{kind}: {speedup} times as fast.{compare}"


def statistic_text(forecasts: Sequence[Forecast]) -> str:
    """Returns a sentence on what is predicted; empty without forecasts."""
    if not forecasts:
        return ""
    # Predictions start from fewer steps than the table has, whose median may be another.
    step = number(1e3 * forecasts[0].present_s)
    return f"Speed-ups are for the median of the first rank's last steps, {step} ms, with 95 % intervals."
