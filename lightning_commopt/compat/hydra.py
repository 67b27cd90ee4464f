"""Private names of Hydra; see `lightning_commopt.compat`."""

from hydra._internal.utils import get_args_parser

__all__ = ["get_args_parser"]  # which words of a command line are overrides, and which are flags, only Hydra knows
