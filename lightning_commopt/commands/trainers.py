"""Runs a training program whose Trainers, in every Python process of it, are made with other arguments."""

from __future__ import annotations

import inspect
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from lightning_commopt.compat.import_hook import call_after_import

VARIABLE = "COMMOPT_TRAINERS"
"""Holds as JSON the function that changes arguments, as "module:name", and its options."""

_NOTE = "made"
"""Name of the file that says a Trainer has been made."""

_STARTUP = Path(__file__).parent / "startup"
"""Has the ``sitecustomize`` that installs this module; it is on all nodes where the package is, unlike a temporary
folder, so that ranks which srun starts elsewhere are changed, too."""

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def run_changed(command: Sequence[str], change: str, options: Mapping[str, Any]) -> tuple[int, bool]:
    """Runs a command to its end, however it starts Python programs.

    Args:
        command: the words of it.
        change: "module:name" of a function that is called with a package's name, the arguments by which a Trainer of it
            is made, which it changes, and ``options``.
        options: options of that function, in JSON types.

    Returns:
        The status of the command, as a shell has it, and whether a Trainer was made on this node.

    Raises:
        OSError: the command cannot be started.
    """
    from lightning_commopt.launch.process import run_beneath  # every Python process of the command imports this module

    with tempfile.TemporaryDirectory(prefix="commopt-") as folder:
        path = os.pathsep.join(filter(None, (str(_STARTUP), os.environ.get("PYTHONPATH"))))
        variable = json.dumps({"change": change, "options": options, "note": str(Path(folder) / _NOTE)})
        environment = {**os.environ, "PYTHONPATH": path, VARIABLE: variable}
        try:
            status = run_beneath(command, environment)
        except OSError as error:
            hint = f"; for a script, write python {command[0]}" if command[0].endswith(".py") else ""
            raise OSError(f"COMMAND cannot be started: {error}{hint}") from error
        return status, (Path(folder) / _NOTE).exists()


def install() -> None:
    """Makes the Trainers of this process with other arguments; imports neither torch nor Lightning."""
    if VARIABLE in os.environ:
        for package in _PACKAGES:
            call_after_import(f"{package}.trainer.trainer", _change_trainer)


def _change_trainer(module: ModuleType) -> None:
    init = module.Trainer.__init__

    @wraps(init)
    def changed(self: Any, *args: Any, **kwargs: Any) -> None:
        call = inspect.signature(init).bind(self, *args, **kwargs)
        own = dict(call.arguments)
        call.apply_defaults()
        defaults = {name: value for name, value in call.arguments.items() if name not in own}
        variable = json.loads(os.environ[VARIABLE])
        place, _, name = variable["change"].partition(":")
        package = module.__name__.removesuffix(".trainer.trainer")
        getattr(import_module(place), name)(package, call.arguments, variable["options"])
        with suppress(OSError):  # the folder is on another node, or has been removed at the end of the command
            Path(variable["note"]).touch()
        # For arguments that are missing Lightning reads variables of the environment, such as PL_TRAINER_MAX_STEPS.
        for name, value in defaults.items():
            if call.arguments[name] is value:
                del call.arguments[name]
        init(*call.args, **call.kwargs)

    module.Trainer.__init__ = changed
