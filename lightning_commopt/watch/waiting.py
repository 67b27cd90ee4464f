"""Determines from frames and device what the training thread does, and ends a process that waits in vain.

No other module of the watches ends a training process; the launcher in `strategy` ends those that it has started.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType

import torch

from lightning_commopt.compat.lightning import RUNS_CALLBACKS, RUNS_TRAINER, SAVES_CHECKPOINTS
from lightning_commopt.text.formatting import escape_controls

_LAUNCHERS = ("torch.distributed.elastic.", "torch.distributed.launch", "torch.distributed.run")
_TORCH = ("torch.", "lightning_commopt.", "contextlib", "functools")
_WAITING = (
    "torch.nn.parallel.distributed",  # C++ broadcasts buffers or the order of buckets; a forward is further in
    "lightning_commopt.sync.diloco.under_way",  # an exchange of DiLoCo, whose collectives are in a thread of its own
    "lightning_commopt.compressors.channel",
    "lightning_commopt.callbacks.all_ranks",
)
"""Modules that wait for a collective in functions without Python frames."""
_POLLING = "lightning_commopt.sync.store"
"""Module in which threads wait until other ranks have written to the store."""


def end_process(reason: str) -> None:
    """Prints ``reason`` on stderr, and ends this process with status 1, without any of its handlers.

    It is only for a process that waits for ranks which cannot come: in a collective that cannot return, handlers would
    never run.
    """
    print_now(reason)
    os._exit(1)


def end_waiting_rank(rank: int, reason: str, waited_s: float) -> None:
    """Ends the process of a rank that has waited for ranks which cannot come; see `end_process`."""
    end_process(f"[rank {rank}] {reason}\n[rank {rank}] This rank has waited for {waited_s:g} s, and ends.")


def print_now(text: str) -> None:
    """Prints lines, which may quote other ranks, on stderr after flushing stdout, as far as these can be written to."""
    unwritable = OSError, ValueError, AttributeError  # its reader has ended, it was closed, or there is none
    with suppress(*unwritable):
        sys.stdout.flush()
    with suppress(*unwritable):
        sys.stderr.write(f"{escape_controls(text)}\n")
        sys.stderr.flush()


def is_in_collective(thread: int) -> bool:
    """Returns whether a thread is in a function of torch's distributed package, or waits in one of `_WAITING`.

    User functions called from there do not count, nor does the launcher that has called the user's program.
    """
    modules = [*_own_modules(thread)]
    if modules and modules[0] in _WAITING:
        return True
    return any(module.startswith("torch.distributed.") and not module.startswith(_LAUNCHERS) for module in modules)


def waits_for_others(thread: int, device: torch.device) -> bool:
    """Returns whether a thread may wait for another rank: in a collective, in backward, for the device.

    Computing a gradient looks like waiting for its average, and a busy device like one in an NCCL kernel: call this
    only if a rank is known to be missing. Gradients that a callback computes are its own.
    """
    if is_in_collective(thread) or is_in_backward(thread):
        return True
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return False
    try:
        return not torch.cuda.default_stream(device).query()
    except RuntimeError:  # after an error the device runs nothing any more
        return False


def is_in_backward(thread: int) -> bool:
    """Returns whether a thread is in a backward of training, where DDP waits in C++."""
    return any(module.startswith("torch.autograd") for module in _own_modules(thread)) and not is_in_callback(thread)


def is_in_callback(thread: int) -> bool:
    """Returns whether a thread runs a callback or saves a checkpoint, which even a lone rank should complete."""
    return any(frame.f_code.co_name in (RUNS_CALLBACKS, SAVES_CHECKPOINTS) for frame in _frames(thread))


def handles_exception_alone(thread: int, device: torch.device) -> bool:
    """Returns whether a thread on which a fit has raised saves, logs or tears down, and waits for no other rank."""
    if waits_for_others(thread, device) or _POLLING in _own_modules(thread):
        return False
    return any(frame.f_code.co_name == RUNS_TRAINER for frame in _frames(thread))


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
