"""Lightning callbacks that measure, watch and train. Each imports only what it needs itself."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = [
    "CUDAProfilerWindow",
    "CommTimeMonitor",
    "HangMonitor",
    "NVTXRanges",
    "OuterMomentum",
    "RunRecorder",
    "SpeedMonitor",
]

if TYPE_CHECKING:
    from lightning_commopt.callbacks.comm_time import CommTimeMonitor
    from lightning_commopt.callbacks.cuda_profiler import CUDAProfilerWindow
    from lightning_commopt.callbacks.hang_monitor import HangMonitor
    from lightning_commopt.callbacks.nvtx_ranges import NVTXRanges
    from lightning_commopt.callbacks.outer_momentum import OuterMomentum
    from lightning_commopt.callbacks.run_recorder import RunRecorder
    from lightning_commopt.callbacks.speed import SpeedMonitor
else:
    _MODULES = {
        "CUDAProfilerWindow": "cuda_profiler",
        "CommTimeMonitor": "comm_time",
        "HangMonitor": "hang_monitor",
        "NVTXRanges": "nvtx_ranges",
        "OuterMomentum": "outer_momentum",
        "RunRecorder": "run_recorder",
        "SpeedMonitor": "speed",
    }

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module 'lightning_commopt.callbacks' has no attribute {name!r}")
        value = getattr(import_module(f"lightning_commopt.callbacks.{_MODULES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*__all__, *globals()})
