"""Private names of Hydra; see `lightning_commopt.compat`."""

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.utils import get_args_parser

__all__ = [
    "FileConfigSource",  # a folder of configs; ours adds a hint to the error for an option that it does not have
    "get_args_parser",  # which words of a command line are overrides, and which are flags, only Hydra knows
]
