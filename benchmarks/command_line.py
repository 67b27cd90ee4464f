"""What benchmarks check before they begin: values of their options, and that this machine can make hosts."""

import argparse
import sys

from lightning_commopt.launch.lab import parse_rate, why_not


def positive(text: str) -> int:
    """Returns an integer above 0; for the ``type`` of an option."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return int(text)


def link_rate(text: str) -> str:
    """Returns a rate that `NetLab` takes, as it was given; for the ``type`` of an option."""
    try:
        parse_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def need_lab() -> None:
    """Ends the program with the reason if this machine cannot make hosts."""
    if (reason := why_not()) is not None:
        sys.exit(reason)
