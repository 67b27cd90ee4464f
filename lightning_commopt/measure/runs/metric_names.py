"""Finds the validation loss and accuracy among a model's metrics, whatever separators their names have."""

from __future__ import annotations

import re
from collections.abc import Iterable

_OPTIONS = {
    "callbacks": "callbacks.commopt_run.val_loss=NAME",
    "trainer": "trainer.callbacks.2.val_loss=NAME",
}
_VALIDATION = ("val", "valid", "validation")
ENDINGS = {"val_loss": ("loss",), "val_accuracy": ("accuracy", "acc")}
"""For each field of a `RunRecord`, the words that may follow "val", "valid" or "validation"."""


def find_metric(names: Iterable[str], field: str) -> str | None:
    """Returns the name of the metric for a field of the record, one of `ENDINGS`; None if no name matches.

    A name matches if it is, or ends in, ``val_loss``, ``valid_loss`` or ``validation_loss``, in any case and with any
    of ``/ _ . -`` and blanks between the words. The shortest one wins, then the alphabetically first.

    >>> find_metric(["train/loss", "val/loss", "val/acc"], "val_loss")
    'val/loss'
    >>> find_metric(["val/acc_best", "model.Validation-Accuracy"], "val_accuracy")
    'model.Validation-Accuracy'
    >>> find_metric(["interval_loss", "val_loss_scale"], "val_loss") is None
    True
    """
    endings = [(validation, ending) for validation in _VALIDATION for ending in ENDINGS[field]]
    found = [name for name in names if tuple(re.split(r"[/_.\-\s]+", name.lower())[-2:]) in endings]
    return min(found, key=lambda name: (len(name), name), default=None)


def how_to_name_loss(metrics: Iterable[str], callbacks_choice: str | None) -> str:
    """Returns how to name the final loss if no metric matched.

    Args:
        metrics: that the model logged.
        callbacks_choice: of the Hydra group ``commopt_record``; None if it was not used.
    """
    option = _OPTIONS.get(callbacks_choice or "", "RunRecorder(val_loss=NAME)")
    logged = ", ".join(sorted(metrics)) or "nothing"
    return f"no metric ends in val_loss or val/loss (logged: {logged}); name it with {option}"
