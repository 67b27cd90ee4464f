"""Judges settings by their final losses."""

from __future__ import annotations

import math
from typing import Literal

from lightning_commopt.measure.runs.metric_names import how_to_name_loss
from lightning_commopt.report.baseline import differ_in_plan
from lightning_commopt.report.model import Setting
from lightning_commopt.text.formatting import number, short_percent

LossVerdict = Literal["worse", "fine", "unknown"]

_SAME = 0.001
_DIGITS = 4


def is_lossless(setting: Setting, baseline: Setting) -> bool:
    """Returns whether a setting certainly trains as the baseline does, but for rounding.

    So it does with a `CommPlan` whose compressor changes no gradients, if it differs from the baseline only in the plan
    and the number of ranks. Of precision, batch size and others' hooks nothing is known.
    """
    has_plan = all(run.record.plan is not None for run in setting.runs)
    return has_plan and not setting.is_lossy and differ_in_plan(setting, baseline)


def loss_verdict(setting: Setting, baseline: Setting) -> LossVerdict:
    """Judges the final losses of a setting by those of the baseline.

    Returns:
        "worse" if a run diverged, or the median is above by more than 0.1 % and all losses are above all of the
        baseline's. "unknown" without losses of both, or if the loss of a single run is above, unless the setting is
        lossless. Else "fine".
    """
    if setting.num_diverged:
        return "worse"
    if setting.val_loss is None or baseline.val_loss is None:
        return "fine" if is_lossless(setting, baseline) else "unknown"
    if setting.val_loss.median - baseline.val_loss.median <= _SAME * abs(baseline.val_loss.median):
        return "fine"
    if _is_single(setting, baseline):
        return "fine" if is_lossless(setting, baseline) else "unknown"
    return "worse" if min(_losses(setting)) > max(_losses(baseline)) else "fine"


def loss_sentence(setting: Setting, baseline: Setting) -> list[str]:
    """Returns a sentence on a setting's final loss; nothing if a lossless plan has none."""
    kind = "It is lossy" if setting.is_lossy else "It is lossless" if is_lossless(setting, baseline) else ""
    between = "; "
    if setting.num_diverged:
        kind = ""
        text = f"in {setting.num_diverged} of its {len(setting.runs)} runs the loss became NaN; do not use it"
    elif setting.val_loss is None or baseline.val_loss is None:
        if kind == "It is lossless":
            return []
        between, text = ", and ", "one of the losses is missing: compare the loss before you use it"
        if setting.val_loss is baseline.val_loss:
            run, why = setting.runs[0], ""
            if any("val" in name for name in run.record.metrics):
                why = f" ({how_to_name_loss(run.record.metrics, run.settings.get('commopt_record'))})"
            text = f"no final loss was recorded{why}: compare the loss before you use it"
    else:
        text = _loss_difference(setting, baseline, setting.val_loss.median, baseline.val_loss.median)
    return [f"{kind}{between}{text}." if kind else f"{text[0].upper()}{text[1:]}."]


def _loss_difference(setting: Setting, baseline: Setting, ours: float, theirs: float) -> str:
    if abs(ours - theirs) <= _SAME * abs(theirs):
        return f"the final loss is the same, {number(ours, _DIGITS)}"
    by = short_percent((ours - theirs) / abs(theirs)) if theirs else number(abs(ours - theirs))
    both = f"{number(ours, _DIGITS)} against {number(theirs, _DIGITS)}"
    text = f"the final loss is {both}, {by} {'above' if ours > theirs else 'below'}"
    if _is_single(setting, baseline):
        return f"{text}, of single runs, whose spread is unknown"
    overlap = max(min(_losses(setting)), min(_losses(baseline))) <= min(max(_losses(setting)), max(_losses(baseline)))
    return f"{text} and {'within' if overlap else 'beyond'} the spread over repetitions"


def _losses(setting: Setting) -> list[float]:
    losses = [run.record.val_loss for run in setting.runs]
    return [loss for loss in losses if loss is not None and math.isfinite(loss)]


def _is_single(setting: Setting, baseline: Setting) -> bool:
    return min(len(_losses(setting)), len(_losses(baseline))) == 1
