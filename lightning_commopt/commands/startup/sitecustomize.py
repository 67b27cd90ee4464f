"""Python imports this when it starts, as `trainers.run_changed` puts this folder on its path; `trainers` has the rest.

An installation may have its own ``sitecustomize``, further down the path, which this one runs first.
"""

import importlib.machinery
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
_others = [path for path in sys.path if os.path.abspath(path or ".") != _here]
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))

from lightning_commopt.commands import trainers  # noqa: E402

trainers.install()
