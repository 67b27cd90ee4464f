"""Runs a function as soon as a module has been imported, without importing it.

``import lightning_commopt`` must make Lightning's registries know our strategies, whichever of the two packages is
imported first; but importing Lightning takes seconds, which ``commopt --help`` should not wait for. So a finder on
``sys.meta_path`` lets the others find the module, and wraps its loader, which then calls the function.

The finder stays: a module may be imported years later, or reloaded. It costs one look into a dict for each import.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

AfterImport = Callable[[ModuleType], None]


def call_after_import(module: str, function: AfterImport) -> None:
    """Calls ``function(module)`` after every import of a module: now if it has been imported, and when it will be.

    Args:
        module: full name, such as ``"lightning.pytorch.strategies"``.
        function: called with the module. What it raises is logged: it must not break somebody else's import.
    """
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    functions = _finder.functions.setdefault(module, [])
    if function not in functions:  # this package may be reloaded
        functions.append(function)
    if module in sys.modules:
        # Not from sys.modules, where it may be half imported by another thread: this waits for that.
        _call(function, importlib.import_module(module))


class _Finder(MetaPathFinder):
    """Finds what the other finders find, with a loader that calls a function."""

    def __init__(self) -> None:
        self.functions: dict[str, list[AfterImport]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        functions = self.functions.get(fullname)
        if functions is None:
            return None
        for finder in list(sys.meta_path):
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find_spec is None else find_spec(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _CallingLoader(spec.loader, functions)
                return spec
        return None


class _CallingLoader(Loader):
    """Loads as another loader does, and then calls functions."""

    def __init__(self, loader: Any, functions: list[AfterImport]) -> None:
        self._loader = loader
        self._functions = functions

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module gets its own loader back, for whoever reads its source or its data files, or pickles its spec.
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        for function in self._functions:
            _call(function, module)

    def __getattr__(self, name: str) -> Any:
        # For whoever has found the module and does not import it, such as pkgutil.
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)


def _call(function: AfterImport, module: ModuleType) -> None:
    try:
        function(module)
    except Exception:
        # Not a warning, which could be an error: whoever imports the module may not even know of this package.
        logging.getLogger(__name__).warning("lightning_commopt: failed after import of %s", module, exc_info=True)


_finder = _Finder()
