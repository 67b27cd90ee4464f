"""Data parallelism without buckets, to compare DDP with."""

from lightning_commopt.strategy.baselines.strategies import InterleavedDP, NaiveDP

__all__ = ["InterleavedDP", "NaiveDP"]
