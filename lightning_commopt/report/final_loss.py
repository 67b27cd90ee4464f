"""Whether the loss at the end of the runs speaks against a setting."""

from __future__ import annotations

import math
from typing import Literal

from lightning_commopt.report.model import Setting
from lightning_commopt.report.phrases import percent_change, significant

LossVerdict = Literal["worse", "fine", "unknown"]

_SAME = 0.001
_DIGITS = 4


def loss_verdict(setting: Setting, reference: Setting) -> LossVerdict:
    """Judges the final losses of a setting by those of the reference.

    Returns:
        "worse" if a run diverged, or the median is above by more than 0.1 % and all losses are above all of the
        reference's. "unknown" for a lossy plan if one of them has no loss, or the loss of a single run is above. Else
        "fine".
    """
    if setting.num_diverged:
        return "worse"
    if setting.val_loss is None or reference.val_loss is None:
        return "unknown" if setting.is_lossy else "fine"
    if setting.val_loss.median - reference.val_loss.median <= _SAME * abs(reference.val_loss.median):
        return "fine"
    if _is_single(setting, reference):
        return "unknown" if setting.is_lossy else "fine"
    return "worse" if min(_losses(setting)) > max(_losses(reference)) else "fine"


def loss_sentence(setting: Setting, reference: Setting) -> list[str]:
    """Returns what to say of a setting's final loss; nothing where a lossless plan has none."""
    if setting.num_diverged:
        return [
            f"In {setting.num_diverged} of its {len(setting.runs)} runs the final loss is no number: do not use it."
        ]
    kind = "It is lossy" if setting.is_lossy else "It is lossless"
    if setting.val_loss is None or reference.val_loss is None:
        return (
            [f"{kind}, and no final loss was recorded: compare the loss before you use it."] if setting.is_lossy else []
        )
    ours, theirs = setting.val_loss.median, reference.val_loss.median
    if abs(ours - theirs) <= _SAME * abs(theirs):
        return [f"{kind}; the final loss is the same, {significant(ours, _DIGITS)}."]
    by = percent_change((ours - theirs) / abs(theirs)) if theirs else significant(abs(ours - theirs))
    both = f"{significant(ours, _DIGITS)} against {significant(theirs, _DIGITS)}"
    says = f"{kind}; the final loss is {both}, {by} {'above' if ours > theirs else 'below'}"
    if _is_single(setting, reference):
        return [f"{says}, of single runs, whose spread is unknown."]
    overlap = max(min(_losses(setting)), min(_losses(reference))) <= min(max(_losses(setting)), max(_losses(reference)))
    return [f"{says} and {'within' if overlap else 'beyond'} the spread over repetitions."]


def _losses(setting: Setting) -> list[float]:
    losses = [run.record.val_loss for run in setting.runs]
    return [loss for loss in losses if loss is not None and math.isfinite(loss)]


def _is_single(setting: Setting, reference: Setting) -> bool:
    return min(len(_losses(setting)), len(_losses(reference))) == 1
