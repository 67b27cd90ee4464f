"""Lightning callbacks that measure."""

from lightning_commopt.callbacks.comm_time import CommTimeLogger
from lightning_commopt.callbacks.cuda_profiler import CUDAProfilerWindow
from lightning_commopt.callbacks.nvtx_ranges import NVTXRanges
from lightning_commopt.callbacks.run_recorder import RunRecorder
from lightning_commopt.callbacks.throughput import Throughput

__all__ = ["CUDAProfilerWindow", "CommTimeLogger", "NVTXRanges", "RunRecorder", "Throughput"]
