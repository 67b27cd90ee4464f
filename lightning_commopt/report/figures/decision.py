"""The picture that decides: speed-up against change of loss; without losses speed-ups alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from lightning_commopt.report.figures.plot import Band, Plot, Point, Trace, extent, linear_axis
from lightning_commopt.report.figures.style import (
    IDEAL_COLOR,
    SYMBOLS,
    Bar,
    Chart,
    Line,
    Part,
    PlanStyle,
    ends_of,
    ideal_line,
    line_styles,
)
from lightning_commopt.report.intervals import TIMES, Interval, kinds_of_intervals, spread_text
from lightning_commopt.report.model import Group, Setting, loss_change_text
from lightning_commopt.report.names import display_name
from lightning_commopt.text.formatting import number

WITHOUT_LOSS = "The runs have no validation loss, so the price of a speed-up is unknown: these are speed-ups alone."
_HEIGHT = 320  # pixels
_PERCENT = 100.0
_SAME = 0.1  # the axis of losses has at least this change to both sides, in per cent: up to here they count as the same
_MAX_NAMED = 24  # settings in a legend, which is then about as high as the plot
_BASELINE = Interval(median=1.0, low=None, high=None, num_values=1)


def decision(group: Group, styles: Mapping[str, PlanStyle]) -> Chart | None:
    """Returns a point for each setting, the baseline at (1, 0); bars without losses; None with fewer than two."""
    speedups = [
        (setting, _BASELINE if setting is group.baseline else setting.speedup)
        for setting in group.settings
        if setting is group.baseline or setting.speedup is not None
    ]
    known = [(setting, speedup) for setting, speedup in speedups if speedup is not None]
    if len(known) < 2:
        return None
    placed = [(setting, speedup) for setting, speedup in known if setting.loss_change is not None]
    if len(placed) < 2 or group.baseline.loss_change is None:
        return _bars(group, known, styles)
    looks, lines = _looks([setting for setting, _ in placed], styles)
    traces = [_point(setting, speedup, style, group) for (setting, speedup), style in zip(placed, looks, strict=True)]
    traces.sort(key=lambda trace: trace.is_marked)
    band = ends_of(group.baseline.loss_change.scaled(_PERCENT))
    across, changes = extent(traces)
    note = _note(group, [speedup for _, speedup in known])
    if len(lines) < len(placed):
        note += " Marks of a plan look alike. The tooltip of a mark names its setting, and the table has all settings."
    if band is not None:
        note += " The band is the spread of the baseline's own loss: a change within it is noise."
    without = [setting.name for setting, _ in known if setting.loss_change is None]
    if without:
        note += f" Left out, because they have no validation loss: {', '.join(without)}."
    axis_x = linear_axis([*across, 1.0])
    axis_y = linear_axis([*changes, *(band or ()), -_SAME, _SAME])
    guides = ideal_line([1.0, 1.0], [axis_y.low, axis_y.high]), ideal_line([axis_x.low, axis_x.high], [0.0, 0.0])
    return Chart(
        title="Speed-up against change of loss",
        note=note,
        x_title=f"speed-up over {group.baseline.name} (times; right is faster)",
        y_title="change of the final validation loss (%; lower is better)",
        plot=Plot(
            x=axis_x,
            y=axis_y,
            traces=(*guides, *traces),
            bands=() if band is None else (Band(IDEAL_COLOR, y_ends=band),),
            height=_HEIGHT,
        ),
        lines=lines,
    )


def _looks(settings: Sequence[Setting], styles: Mapping[str, PlanStyle]) -> tuple[list[PlanStyle], tuple[Line, ...]]:
    """Returns the look of each setting's mark, and the legend: of plans where settings are too many for own looks."""
    methods = [setting.sync_method for setting in settings]
    if len(methods) <= _MAX_NAMED and max(Counter(methods).values()) <= len(SYMBOLS):
        looks, names = line_styles(methods, styles), [setting.name for setting in settings]
    else:
        looks, names = [styles[method] for method in methods], list(map(display_name, methods))
    look_of = dict(zip(names, looks, strict=True))
    return looks, tuple(Line(name, style, is_line=False) for name, style in look_of.items())


def _note(group: Group, speedups: list[Interval]) -> str:
    kinds = kinds_of_intervals(speedups)
    return f"Error bars are {kinds}." if kinds else "Each setting was measured once, so nothing is certain."


def _point(setting: Setting, speedup: Interval, style: PlanStyle, group: Group) -> Trace:
    assert setting.loss_change is not None
    is_recommended = setting is group.recommended
    words = ["baseline"] if setting is group.baseline else []
    change = setting.loss_change.scaled(_PERCENT)
    point = Point(
        speedup.median,
        change.median,
        f"{_speedup_text(setting, speedup)}; loss {loss_change_text(setting.loss_change)}",
        x_ends=ends_of(speedup),
        y_ends=None if setting is group.baseline else ends_of(change),
        label=", ".join([*words, *(["recommended"] if is_recommended else [])]),
    )
    return Trace(points=(point,), color=style.color, symbol=style.symbol, is_marked=is_recommended)


def _speedup_text(setting: Setting, speedup: Interval) -> str:
    ends = spread_text(speedup)
    return f"{setting.name}: {number(speedup.median)}{TIMES}{f' ({ends})' if ends else ''}"


def _bars(group: Group, speedups: list[tuple[Setting, Interval]], styles: Mapping[str, PlanStyle]) -> Chart:
    most = max(speedup.median if speedup.high is None else speedup.high for _, speedup in speedups)
    bars = []
    for setting, speedup in speedups:
        words = ["baseline"] if setting is group.baseline else []
        words += ["recommended"] if setting is group.recommended else []
        value = f"{number(speedup.median)}{TIMES}{''.join(f', {word}' for word in words)}"
        part = Part(0, speedup.median / most, _speedup_text(setting, speedup), color=styles[setting.sync_method].color)
        bars.append(Bar(setting.name, value, (part,), ends_of(speedup.scaled(1 / most))))
    return Chart(
        title="Speed-up",
        note=f"{WITHOUT_LOSS} {_note(group, [speedup for _, speedup in speedups])}",
        x_title=f"speed-up over {group.baseline.name} (times)",
        bars=tuple(bars),
    )
