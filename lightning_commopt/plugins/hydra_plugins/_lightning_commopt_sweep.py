"""Where Hydra finds commopt-train's launcher: it makes plugins of this namespace only.

The underscore keeps Hydra from importing this module, and torch with it, in every other application.
"""

from lightning_commopt.train.sweep.launcher import FreshProcessLauncher

__all__ = ["FreshProcessLauncher"]
