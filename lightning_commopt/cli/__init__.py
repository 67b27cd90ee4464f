"""The console command ``commopt``."""

from lightning_commopt.cli.commands import app

__all__ = ["app"]
