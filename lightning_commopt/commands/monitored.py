"""``commopt run``: the callbacks that a script's Trainers get."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

CHANGE = f"{__name__}:add_monitors"


def add_monitors(package: str, arguments: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Adds the monitors that a Trainer does not have already; see `trainers.run_changed`."""
    from lightning_commopt.callbacks import CommTimeMonitor, HangMonitor

    existing = arguments["callbacks"] or ()
    callbacks = list(existing) if isinstance(existing, Iterable) else [existing]  # Hydra gives a ListConfig
    for monitor in (CommTimeMonitor(prog_bar=True), HangMonitor()):
        if not any(isinstance(callback, type(monitor)) for callback in callbacks):
            callbacks.append(monitor)
    arguments["callbacks"] = callbacks
