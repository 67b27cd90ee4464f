"""Runs a training program so that the Trainers of every Python process of it get ``CommOptDDP(plan="auto")``."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from lightning_commopt.strategy.ddp import CommOptStrategy

FOUND, SEARCHED = "found.json", "searched"
"""Files in a folder that all fits know: the result of rank 0, and a marker that some rank has looked for a plan."""


class Tuned(NamedTuple):
    """How a command has ended.

    Attributes:
        status: exit status of the command.
        verdict: the verdict in words; its plan has been written to the output. None if rank 0 has not looked for a plan
            on this host, or if the command failed before any fit has decided on one.
        has_searched: whether any rank on this host has looked for a plan.
    """

    status: int
    verdict: str | None
    has_searched: bool


def run_tuned(command: Sequence[str], *, lossy: Sequence[str], output: Path, ends_fit: bool) -> Tuned:
    """Runs a command, however it starts Python programs, to its end. Without a verdict ``output`` is left unchanged.

    Raises:
        ValueError: a name in ``lossy`` is unknown, or ``output`` cannot be written.
        OSError: the command cannot be started, or ``output`` can no longer be written; the message has the plan then.
    """
    from lightning_commopt.commands.errors import check_outputs
    from lightning_commopt.commands.trainers import run_changed
    from lightning_commopt.measure.plain import write_whole
    from lightning_commopt.tune.options import TuneOptions

    TuneOptions.of("auto", list(lossy), {})
    check_outputs(output)
    with tempfile.TemporaryDirectory(prefix="commopt-tune-") as folder:
        options = {"lossy": list(lossy), "folder": folder, "ends_fit": ends_fit}
        status, _ = run_changed(command, f"{__name__}:{tune_trainer.__name__}", options)
        has_searched = (Path(folder) / SEARCHED).exists()
        try:
            result = json.loads((Path(folder) / FOUND).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return Tuned(status, None, has_searched)
    if status and not result["has_decided"]:
        return Tuned(status, None, has_searched)
    try:
        write_whole(output, result["plan"] + "\n")
    except OSError as error:
        raise OSError(f"{error}. {result['verdict']} The plan: {result['plan']}") from error
    return Tuned(status, result["verdict"], has_searched)


def tune_trainer(package: str, arguments: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Puts a strategy that looks for a plan in the place of a Trainer's; see `trainers.run_changed`."""
    from lightning_commopt.strategy.adapters import adapter_for

    arguments["strategy"] = tuned_strategy(arguments["strategy"], adapter_for(package), options)


def tuned_strategy(strategy: object, ours: type[CommOptStrategy], options: Mapping[str, Any]) -> CommOptStrategy:
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
            raise ValueError(f"commopt tune is for DDP, but the Trainer has strategy={strategy!r}")
        strategy = ours(**(known or {}))
    elif is_lightnings_ddp(strategy):
        if comm_hook_of(strategy) is not None:
            raise ValueError("commopt tune has nothing to choose: remove ddp_comm_hook from the Trainer's DDPStrategy")
        strategy = ours(**arguments_of_ddp(strategy))
    elif not isinstance(strategy, CommOptStrategy) or is_baseline(strategy):
        raise ValueError(f"commopt tune is for DDP, but the Trainer has strategy={strategy!r}")
    strategy.auto_plan = Tuning(strategy, options)
    return strategy
