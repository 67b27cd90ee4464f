"""Runs a training program so that the Trainers of every Python process of it get ``CommOptDDP(plan="auto")``."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_commopt.compat.import_hook import call_after_import

if TYPE_CHECKING:
    from lightning_commopt.strategy.ddp import CommOptStrategy

VARIABLE = "COMMOPT_TUNE"
"""Holds, as JSON, what the program's processes read: ``lossy``, ``output``, ``verdict`` (a file) and ``ends_fit``."""

# Python imports ``sitecustomize`` when it starts. An installation may have its own, further down the path, which this
# one runs first.
_SITECUSTOMIZE = """\
import importlib.machinery, importlib.util, os, sys

_here = os.path.dirname(os.path.abspath(__file__))
_others = [path for path in sys.path if os.path.abspath(path or ".") != _here]
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
from lightning_commopt.commands.tune import inject

inject.install()
"""


def run_tuned(command: Sequence[str], *, lossy: Sequence[str], output: Path, ends_fit: bool) -> tuple[int, str | None]:
    """Runs a command, which starts Python programs in whatever way, to its end.

    Returns:
        The status of the command; and the verdict in words, None if no fit has looked for a plan. The plan is in
        ``output``.

    Raises:
        ValueError: a name in ``lossy`` is unknown, or ``output`` cannot be written.
        OSError: the command cannot be started.
    """
    from lightning_commopt.commands.errors import check_outputs
    from lightning_commopt.tune.options import TuneOptions

    TuneOptions.of("auto", list(lossy), {})
    check_outputs(output)
    with tempfile.TemporaryDirectory(prefix="commopt-tune-") as folder:
        (Path(folder) / "sitecustomize.py").write_text(_SITECUSTOMIZE, encoding="utf-8")
        verdict = Path(folder) / "verdict.txt"
        asked = {"lossy": list(lossy), "output": str(output.absolute()), "verdict": str(verdict), "ends_fit": ends_fit}
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        ran = subprocess.run(
            list(command), env={**os.environ, "PYTHONPATH": path, VARIABLE: json.dumps(asked)}, check=False
        )
        return ran.returncode, verdict.read_text(encoding="utf-8") if verdict.is_file() else None


_MODULES = {
    "lightning.pytorch.trainer.trainer": "lightning_commopt.lightning",
    "pytorch_lightning.trainer.trainer": "lightning_commopt.pytorch_lightning",
}


def install() -> None:
    """Makes the Trainers of this process tune; imports neither torch nor Lightning."""
    if VARIABLE in os.environ:
        for module in _MODULES:
            call_after_import(module, _change_trainer)


def _change_trainer(module: ModuleType) -> None:
    init = module.Trainer.__init__

    @wraps(init)
    def tuned(self: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(init).bind(self, *args, **kwargs)
        given.apply_defaults()
        ours = import_module(_MODULES[module.__name__]).CommOptDDP
        given.arguments["strategy"] = tuned_strategy(given.arguments["strategy"], ours)
        init(*given.args, **given.kwargs)

    module.Trainer.__init__ = tuned


def tuned_strategy(strategy: object, ours: type[CommOptStrategy]) -> CommOptStrategy:
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
    strategy.auto_plan = Tuning(strategy, json.loads(os.environ[VARIABLE]))
    return strategy
