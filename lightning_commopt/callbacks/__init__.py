"""Lightning callbacks that measure."""

from lightning_commopt.callbacks.comm_time import CommTimeMonitor
from lightning_commopt.callbacks.cuda_profiler import CUDAProfilerWindow
from lightning_commopt.callbacks.hang_monitor import HangMonitor
from lightning_commopt.callbacks.nvtx_ranges import NVTXRanges
from lightning_commopt.callbacks.run_recorder import RunRecorder
from lightning_commopt.callbacks.speed import SpeedMonitor

__all__ = ["CUDAProfilerWindow", "CommTimeMonitor", "HangMonitor", "NVTXRanges", "RunRecorder", "SpeedMonitor"]
