"""The one place of this package that ends a process of training."""

from __future__ import annotations

import os
import sys


def end_process(reason: str) -> None:
    """Prints why on stderr, and ends this process with status 1, without any of its handlers.

    Only for a process that waits for others in vain: in a collective that cannot return, handlers never run.

    Args:
        reason: one or more whole lines.
    """
    print_now(reason)
    os._exit(1)


def print_now(text: str) -> None:
    """Prints lines on stderr after what this process has printed before."""
    sys.stdout.flush()
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
