"""The one place of this package that ends a process of training."""

from __future__ import annotations

import os
import sys


def end_process(reason: str) -> None:
    """Prints ``reason`` on stderr, and ends this process with status 1, without any of its handlers.

    Only for a process that waits for others in vain: in a collective that cannot return, handlers never run.
    """
    print_now(reason)
    os._exit(1)


def end_waiting_rank(rank: int, reason: str, waited_s: float) -> None:
    """Ends the process of a rank that has waited in vain; see `end_process`."""
    end_process(f"[rank {rank}] {reason}\n[rank {rank}] This rank has waited for {waited_s:g} s, and ends.")


def print_now(text: str) -> None:
    """Prints lines on stderr after flushing stdout."""
    sys.stdout.flush()
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
