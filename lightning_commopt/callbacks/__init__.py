"""Lightning callbacks that measure."""

from lightning_commopt.callbacks.throughput import Throughput

__all__ = ["Throughput"]
