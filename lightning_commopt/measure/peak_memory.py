"""The peak memory of a fit."""

from __future__ import annotations

import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

_KIBIBYTE = 1024
_UNIT_OF_GETRUSAGE = 1 if sys.platform == "darwin" else _KIBIBYTE
_RESET_PEAK = "5"  # see proc(5), /proc/pid/clear_refs


class PeakMemory:
    """The peak of a rank's device from now on.

    On CUDA it is the memory that torch allocated, and ``torch.cuda``'s own peak is reset. Else it is the resident
    memory of the process, since its start where the system cannot reset that peak (Linux can).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_reset = False
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")
            self._is_reset = True

    @property
    def num_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if self._is_reset:
            found = re.search(
                r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE
            )
            if found:
                return int(found[1]) * _KIBIBYTE
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT_OF_GETRUSAGE
