"""Private names of Fabric; see `lightning_commopt.compat`."""

from lightning.fabric.strategies.ddp import _DDPBackwardSyncControl as DDPBackwardSyncControl

__all__ = ["DDPBackwardSyncControl"]  # Fabric asks it for the context of no_backward_sync
