"""Gives every Hydra application the config group ``commopt``, and ``trainer.strategy=commopt_ddp_bf16`` by name.

Hydra imports this module whenever an application starts. It imports `lightning_commopt`, which makes the names known
when Lightning is imported, and by that neither torch nor Lightning.
"""

from difflib import get_close_matches

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.plugins.search_path_plugin import SearchPathPlugin

from lightning_commopt.compat.hydra import FileConfigSource
from lightning_commopt.launch.conf_path import conf_dir


class CommOptSearchPath(SearchPathPlugin):
    """Appends the package's ``conf/downstream``, and nothing else of ours, to an application's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        path = f"{CommOptConfigSource.scheme()}://{conf_dir() / 'downstream'}"
        search_path.append(provider="lightning-commopt", path=path)


class CommOptConfigSource(FileConfigSource):
    """A folder of configs that suggests what was probably meant by an option that it does not have.

    Hydra lists its sources, as they describe themselves, in the error that ends the program.
    """

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        self._question = ""

    @staticmethod
    def scheme() -> str:
        return "commopt"

    def is_config(self, config_path: str) -> bool:
        """Returns whether there is such a config, and keeps a name that is near if there is not."""
        is_there = super().is_config(config_path)
        group, _, option = config_path.rpartition("/")
        if not is_there and group and self.is_group(group):
            near = get_close_matches(option.lower(), self.list(group, ObjectType.CONFIG), n=1)
            self._question = f"\n\tDid you mean '{group}/{near[0]}'?" if near else ""
        return is_there

    def __repr__(self) -> str:
        """Returns what Hydra shows of a source."""
        return super().__repr__() + self._question
