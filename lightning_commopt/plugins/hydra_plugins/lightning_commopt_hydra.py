"""Gives every Hydra application the config group ``commopt``.

Hydra imports this module whenever an application starts, so it imports neither torch nor `lightning_commopt`.
"""

import importlib.util
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class CommOptSearchPath(SearchPathPlugin):
    """Appends the package's ``conf/downstream``, and nothing else of ours, to an application's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Appends the folder, so that the application's own configs come first."""
        search_path.append(provider="lightning-commopt", path=f"file://{_conf_dir() / 'downstream'}")


def _conf_dir() -> Path:
    spec = importlib.util.find_spec("lightning_commopt")  # finds a top-level package without importing it
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    in_wheel = package / "conf"
    return in_wheel if in_wheel.is_dir() else package.parent / "conf"
