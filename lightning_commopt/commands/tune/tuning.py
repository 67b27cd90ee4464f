"""Tuning: what a strategy does in its fits under ``commopt tune``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_commopt.commands.tune.inject import FOUND, SEARCHED
from lightning_commopt.plan import CommPlan
from lightning_commopt.sync.strategies import TunedBuckets, trainer_of
from lightning_commopt.text.validation import info
from lightning_commopt.tune.auto_plan import FitPlan
from lightning_commopt.tune.options import TuneOptions

_UNDECIDED = ("measuring", "too short", "searching")
"""Statuses of a fit that ended before anything was decided."""


class Tuning(FitPlan):
    """Looks for a plan whatever that costs, and leaves it to the command.

    ``command_options`` is what the command was called with, see `inject.run_tuned`.

    Of several fits the last that has decided something counts, or the first if none has.
    """

    _tells_verdict = False  # the command prints it
    _max_regret = 1e6  # the search may cost any multiple of the fit's time, as these fits run in order to be tuned

    def __init__(self, strategy: TunedBuckets, command_options: Mapping[str, Any]) -> None:
        options = TuneOptions.of("auto", command_options["lossy"], strategy.plan.to_dict())
        super().__init__(strategy, options)
        self._command_options = command_options

    def begin_batch(self, batch: Any, batch_idx: int) -> None:
        """Ends the fit when the plan is found."""
        super().begin_batch(batch, batch_idx)
        if self._command_options["ends_fit"] and self.has_decided:
            trainer_of(self._strategy).should_stop = True

    def end_fit(self, keep: Callable[[CommPlan], None] | None = None) -> None:
        has_searched, folder = self._tuner is not None, Path(self._command_options["folder"])
        super().end_fit(keep)
        if not has_searched:
            return
        description = self.describe()
        if not folder.is_dir():
            if description:
                plan = self._strategy.plan.to_json()
                info(
                    "commopt tune runs on another node, so it cannot write the plan."
                    f" {description['verdict']} The plan: {plan}"
                )
            return
        (folder / SEARCHED).touch()
        if not description:
            return
        has_decided = description["num_search_steps"] > 0 or description["status"] not in _UNDECIDED
        if has_decided or not (folder / FOUND).exists():
            result = {
                "plan": self._strategy.plan.to_json(),
                "verdict": description["verdict"],
                "has_decided": has_decided,
            }
            (folder / FOUND).write_text(json.dumps(result), encoding="utf-8")
