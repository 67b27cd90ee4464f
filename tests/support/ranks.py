"""Runs a function on several real ranks: that of the package, with what tests need imported before ranks are forked."""

from lightning_commopt.commands.selftest.ranks import PROCESSES, RankError, run_ranks, run_ranks_or_raise
from support.lightnings import ADAPTER, PACKAGE

__all__ = ["RankError", "run_ranks", "run_ranks_or_raise"]

PROCESSES.set_forkserver_preload([*("torch.distributed", "torch._dynamo", "pytest"), *(PACKAGE, ADAPTER)])
