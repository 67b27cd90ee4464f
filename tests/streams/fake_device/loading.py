"""Gives this process the fake device."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path


def load_device(driver: str | Path, runtime: str | Path) -> None:
    """Must be called before torch is imported, whose libraries then find these."""
    for library in (driver, runtime):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def take_device(operators: str | Path) -> None:
    """Makes torch, which has been imported, compute and allocate on the fake device."""
    import torch

    library = ctypes.CDLL(str(operators))
    library.fake_device_replace_operators()
    library.fake_device_take_allocations()
    # CPUs have no operators that stand in for those of cuDNN and of fused attention.
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)


def begin_schedule(late: int) -> None:
    """Makes those streams late whose bits are set, in the order of their first work from now on."""
    runtime().fake_device_begin_run(ctypes.c_uint64(late))


def end_schedule() -> None:
    runtime().fake_device_end_run()


@cache
def runtime() -> ctypes.CDLL:
    return ctypes.CDLL("libfake_device.so")  # the one that was loaded
