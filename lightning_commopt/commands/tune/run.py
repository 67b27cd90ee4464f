"""Runs a training program so that every Python process of it tunes its plan."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "COMMOPT_TUNE"
"""Holds, as JSON, what `inject` reads: ``lossy``, ``output``, ``verdict`` (a file) and ``ends_fit``."""

# Python imports it when it starts. An installation may have one of its own, which comes next on the path.
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
    """Runs a command to its end.

    Args:
        command: starts Python programs, in whatever way.
        lossy: names of compressors that may be chosen.
        output: the file for the plan; its folder exists.
        ends_fit: end a fit when its plan is found.

    Returns:
        The status of the command; and what was found, None if nothing was.

    Raises:
        ValueError: a name in ``lossy`` is unknown.
        OSError: the command cannot be started, or the folder of ``output`` does not exist.
    """
    from lightning_commopt.tune.options import TuneOptions

    TuneOptions.of("auto", list(lossy), {})
    if not output.absolute().parent.is_dir():
        raise FileNotFoundError(f"--output={output}: there is no folder {output.absolute().parent}")
    with tempfile.TemporaryDirectory(prefix="commopt-tune-") as folder:
        (Path(folder) / "sitecustomize.py").write_text(_SITECUSTOMIZE, encoding="utf-8")
        verdict = Path(folder) / "verdict.txt"
        asked = {"lossy": list(lossy), "output": str(output.absolute()), "verdict": str(verdict), "ends_fit": ends_fit}
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        ran = subprocess.run(
            list(command), env={**os.environ, "PYTHONPATH": path, VARIABLE: json.dumps(asked)}, check=False
        )
        return ran.returncode, verdict.read_text(encoding="utf-8") if verdict.is_file() else None
