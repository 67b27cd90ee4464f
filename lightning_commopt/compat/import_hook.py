"""Runs a function as soon as a module has been imported, without importing it.

``import lightning_commopt`` must add our strategies to Lightning's registries, whichever package is imported first. But
importing Lightning takes seconds, which ``commopt --help`` should not spend. So a finder on ``sys.meta_path`` lets the
other finders find the module, and wraps its loader, which then calls the function.

The finder stays, since a module may be imported later or reloaded. It costs one dict lookup per import.
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
    """Calls ``function(module)`` after every import of a module, and at once if it has been imported already.

    Its exceptions are logged, since they must not break the user's import.
    """
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    functions = _finder.functions.setdefault(module, [])
    if function not in functions:  # this package may be reloaded
        functions.append(function)
    if module in sys.modules:
        # The module in sys.modules may be incomplete: import_module waits if another thread is importing it.
        _call(function, importlib.import_module(module))


class _Finder(MetaPathFinder):
    """Delegates to the other finders, and wraps the loader."""

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
            spec: ModuleSpec | None = None if find_spec is None else find_spec(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _CallingLoader(spec.loader, functions)
                return spec
        return None


class _CallingLoader(Loader):
    """Delegates to another loader, then calls functions."""

    def __init__(self, loader: Any, functions: list[AfterImport]) -> None:
        self._loader = loader
        self._functions = functions

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Restores the module's own loader, for code that reads its source or data files, or pickles its spec.
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        for function in self._functions:
            _call(function, module)

    def __getattr__(self, name: str) -> Any:
        # Code such as pkgutil, which finds the module without importing it, uses the loader's other methods.
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)


def _call(function: AfterImport, module: ModuleType) -> None:
    try:
        function(module)
    except Exception:
        # This is not a warning, because the importing code may turn warnings into errors.
        logging.getLogger(__name__).warning("lightning_commopt: failed after import of %s", module, exc_info=True)


_finder = _Finder()
