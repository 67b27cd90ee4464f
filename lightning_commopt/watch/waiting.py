"""What the thread that trains does at this moment, as far as its Python frames and its device show it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

import torch

from lightning_commopt.compat.lightning import RUNS_CALLBACKS, SAVES_CHECKPOINTS

_LAUNCHERS = ("torch.distributed.elastic.", "torch.distributed.launch", "torch.distributed.run")
_TORCH = ("torch.", "lightning_commopt.", "contextlib", "functools")


def is_in_collective(thread: int) -> bool:
    """Returns whether a thread has called a function of torch's distributed package that has not returned.

    Functions of the user's that it has called in turn do not count, nor does the launcher that has called the user's.
    """
    return any(
        module.startswith("torch.distributed.") and not module.startswith(_LAUNCHERS) for module in _own_modules(thread)
    )


def waits_for_others(thread: int, device: torch.device) -> bool:
    """Returns whether a thread is where it would wait for another rank: in a collective, in backward, for the device.

    A rank that computes a gradient cannot be told from one that waits for its average, nor a device that computes from
    one that waits in NCCL's kernel: ask only where a rank is known to be missing.

    Args:
        thread: ident of the thread.
        device: that it trains on.
    """
    if is_in_collective(thread) or any(module.startswith("torch.autograd") for module in _own_modules(thread)):
        return True
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return False
    try:
        return not torch.cuda.default_stream(device).query()
    except RuntimeError:  # an earlier error of the device: it runs nothing any more
        return False


def is_in_callback(thread: int) -> bool:
    """Returns whether a thread runs a callback or saves a checkpoint, which are worth ending also on a rank alone."""
    return any(frame.f_code.co_name in (RUNS_CALLBACKS, SAVES_CHECKPOINTS) for frame in _frames(thread))


def _own_modules(thread: int) -> Iterator[str]:
    """Yields the modules of a thread's innermost frames, up to the first one that is neither torch's nor ours."""
    for frame in _frames(thread):
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(_TORCH):
            return
        yield module


def _frames(thread: int) -> Iterator[FrameType]:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back
