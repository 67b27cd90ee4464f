"""Runs a training program so that the Trainers of every Python process of it get ``CommOptDDP(plan="auto")``."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_commopt.strategy.ddp import CommOptStrategy


def run_tuned(command: Sequence[str], *, lossy: Sequence[str], output: Path, ends_fit: bool) -> tuple[int, str | None]:
    """Runs a command, which starts Python programs in whatever way, to its end.

    Returns:
        The status of the command; and the verdict in words, with the plan in ``output``. It is None, and ``output`` is
        untouched, if no fit has looked for a plan, or if the command fails before any fit has decided on one.

    Raises:
        ValueError: a name in ``lossy`` is unknown, or ``output`` cannot be written.
        OSError: the command cannot be started.
    """
    from lightning_commopt.commands.errors import check_outputs
    from lightning_commopt.commands.trainers import run_changed
    from lightning_commopt.tune.options import TuneOptions

    TuneOptions.of("auto", list(lossy), {})
    check_outputs(output)
    with tempfile.TemporaryDirectory(prefix="commopt-tune-") as folder:
        verdict, undecided = Path(folder) / "verdict.txt", Path(folder) / "undecided.json"
        asked = {
            "lossy": list(lossy),
            "output": str(output.absolute()),
            "undecided": str(undecided),
            "verdict": str(verdict),
            "ends_fit": ends_fit,
        }
        status, _ = run_changed(command, f"{__name__}:{tune_trainer.__name__}", asked)
        if not verdict.is_file():
            return status, None
        if undecided.is_file():
            if status:
                return status, None
            output.write_bytes(undecided.read_bytes())
        return status, verdict.read_text(encoding="utf-8")


def tune_trainer(package: str, arguments: dict[str, Any], asked: Mapping[str, Any]) -> None:
    """Puts a strategy that looks for a plan in the place of a Trainer's; see `trainers.run_changed`."""
    from lightning_commopt.strategy.adapters import adapter_for

    arguments["strategy"] = tuned_strategy(arguments["strategy"], adapter_for(package), asked)


def tuned_strategy(strategy: object, ours: type[CommOptStrategy], asked: Mapping[str, Any]) -> CommOptStrategy:
    """Returns the strategy that replaces a Trainer's, of the class ``ours`` unless that is from this package already.

    Raises:
        ValueError: the strategy is not DDP, or has a comm hook.
    """
    from lightning_commopt.commands.tune.tuning import Tuning
    from lightning_commopt.compat.lightning import arguments_of_ddp, comm_hook_of, is_lightnings_ddp
    from lightning_commopt.strategy.adapters import aliases
    from lightning_commopt.strategy.base import is_baseline
    from lightning_commopt.strategy.ddp import CommOptStrategy

    if isinstance(strategy, str):
        name = strategy.removeprefix("commopt_")
        known = aliases().get(f"commopt_{name}")
        if strategy != "auto" and known is None:
            raise ValueError(f"commopt tune is for DDP, and the Trainer has strategy={strategy!r}")
        strategy = ours(**(known or {}))
    elif is_lightnings_ddp(strategy):
        if comm_hook_of(strategy) is not None:
            raise ValueError("commopt tune has nothing to choose: the Trainer's DDPStrategy has a ddp_comm_hook")
        strategy = ours(**arguments_of_ddp(strategy))
    elif not isinstance(strategy, CommOptStrategy) or is_baseline(strategy):
        raise ValueError(f"commopt tune is for DDP, and the Trainer has strategy={strategy!r}")
    strategy.auto_plan = Tuning(strategy, asked)
    return strategy
