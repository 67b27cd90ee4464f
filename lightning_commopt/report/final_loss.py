"""Whether the loss at the end of the runs speaks against a setting."""

from __future__ import annotations

import math
from typing import Final, Literal

from lightning_commopt.measure.runs.metric_names import how_to_name_loss
from lightning_commopt.report.baseline import differ_in_plan
from lightning_commopt.report.model import Setting
from lightning_commopt.text.formatting import number, short_percent

LossVerdict = Literal["worse", "fine", "unknown"]

_SAME = 0.001
_DIGITS = 4


def is_lossless(setting: Setting, baseline: Setting) -> bool:
    """Returns whether what is known of a setting says that it trains as the baseline does, but for rounding.

    That is where it has a `CommPlan` whose compressor changes no gradients, and differs from the baseline in nothing
    but the plan and the number of ranks. Of precision, batch size and others' hooks nothing is known.
    """
    has_plan = all(run.record.plan is not None for run in setting.runs)
    return has_plan and not setting.is_lossy and differ_in_plan(setting, baseline)


def loss_verdict(setting: Setting, baseline: Setting) -> LossVerdict:
    """Judges the final losses of a setting by those of the baseline.

    Returns:
        "worse" if a run diverged, or the median is above by more than 0.1 % and all losses are above all of the
        baseline's. "unknown" if one of them has no loss, or the loss of a single run is above, unless the setting is
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
    """Returns what to say of a setting's final loss; nothing where a lossless plan has none."""
    if setting.num_diverged:
        return [_sentence("", "", "diverged", num=setting.num_diverged, of=len(setting.runs))]
    kind = "It is lossy" if setting.is_lossy else "It is lossless" if is_lossless(setting, baseline) else ""
    if setting.val_loss is None or baseline.val_loss is None:
        if kind == "It is lossless":
            return []
        has_none = setting.val_loss is baseline.val_loss
        return [_sentence(kind, ", and ", "not recorded" if has_none else "one missing", why=_why(setting))]
    ours, theirs = setting.val_loss.median, baseline.val_loss.median
    if abs(ours - theirs) <= _SAME * abs(theirs):
        return [_sentence(kind, "; ", "same", loss=number(ours, _DIGITS))]
    by = short_percent((ours - theirs) / abs(theirs)) if theirs else number(abs(ours - theirs))
    says = {
        "both": f"{number(ours, _DIGITS)} against {number(theirs, _DIGITS)}",
        "by": f"{by} {'above' if ours > theirs else 'below'}",
    }
    if _is_single(setting, baseline):
        return [_sentence(kind, "; ", "single", **says)]
    overlap = max(min(_losses(setting)), min(_losses(baseline))) <= min(max(_losses(setting)), max(_losses(baseline)))
    return [_sentence(kind, "; ", "within" if overlap else "beyond", **says)]


def _sentence(kind: str, between: str, text: str, **values: object) -> str:
    sentence = LOSSES[text].format(**values)
    return f"{kind}{between}{sentence}." if kind else f"{sentence[0].upper()}{sentence[1:]}."


def _why(setting: Setting) -> str:
    run = setting.runs[0]
    if not any("val" in name for name in run.record.metrics):
        return ""
    return f" ({how_to_name_loss(run.record.metrics, run.settings.get('commopt_record'))})"


def _losses(setting: Setting) -> list[float]:
    losses = [run.record.val_loss for run in setting.runs]
    return [loss for loss in losses if loss is not None and math.isfinite(loss)]


def _is_single(setting: Setting, baseline: Setting) -> bool:
    return min(len(_losses(setting)), len(_losses(baseline))) == 1


LOSSES: Final = {
    "diverged": "in {num} of its {of} runs the loss became NaN; do not use it",
    "not recorded": "no final loss was recorded{why}: compare the loss before you use it",
    "one missing": "one of the losses is missing: compare the loss before you use it",
    "same": "the final loss is the same, {loss}",
    "single": "the final loss is {both}, {by}, of single runs, whose spread is unknown",
    "within": "the final loss is {both}, {by} and within the spread over repetitions",
    "beyond": "the final loss is {both}, {by} and beyond the spread over repetitions",
}
