"""Resolvers for the configuration, which query the machine or compute: ``${commopt.devices:2}``."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from lightning_commopt.compat.hydra import register_resolver
from lightning_commopt.launch.environment import has_external_launcher, is_lab_rank
from lightning_commopt.launch.lab import why_not

why_no_lab = cache(why_not)
"""Returns why the network lab does not work here, or None if it does; tried once in a process."""


def register_resolvers() -> None:
    """Registers our resolvers with OmegaConf.

    - ``${commopt.accelerator:}``: "gpu" if there is one, else "cpu";
    - ``${commopt.device:}``: "cuda:0" or "cpu";
    - ``${commopt.devices:n}``: the number of GPUs, or ``n`` processes on the CPU;
    - ``${commopt.gpu_or_cpu:a,b}``: ``a`` with a GPU, else ``b``;
    - ``${commopt.link:rate,accelerator}``: the rate if this run can have a link of that rate, else null;
    - ``${commopt.divide:n,d,...}``: ``n`` divided by all others; an error if there is a remainder;
    - ``${commopt.multiply:n,m,...}``: the product.

    Each queries the machine that resolves it: Hydra sends resolvers from a login node to the nodes where jobs run.
    """
    resolvers: dict[str, Callable[..., Any]] = {
        "commopt.accelerator": lambda: "gpu" if _has_gpu() else "cpu",
        "commopt.device": lambda: "cuda:0" if _has_gpu() else "cpu",
        "commopt.devices": lambda num_cpu_processes: torch.cuda.device_count() if _has_gpu() else num_cpu_processes,
        "commopt.gpu_or_cpu": lambda on_gpu, on_cpu: on_gpu if _has_gpu() else on_cpu,
        "commopt.link": link,
        "commopt.divide": divide,
        "commopt.multiply": multiply,
    }
    for name, resolver in resolvers.items():
        register_resolver(name, resolver)


def _has_gpu() -> bool:
    return torch.cuda.is_available()


def link(rate: str, accelerator: str) -> str | None:
    """Returns a rate for `NetLab` if ranks on this accelerator can be hosts of the network lab, else None."""
    can_start_lab = accelerator == "cpu" and not has_external_launcher()
    return rate if is_lab_rank() or (can_start_lab and why_no_lab() is None) else None


def divide(number: int, *divisors: int) -> int:
    """Divides integers above 0; a remainder is a ValueError.

    >>> divide(1024, 4, 2)
    128
    """
    _check_counts("commopt.divide", number, *divisors)
    divisor = math.prod(divisors)
    if number % divisor:
        raise ValueError(f"{number} cannot be divided by {' x '.join(map(str, divisors))} without a remainder")
    return number // divisor


def multiply(*factors: int) -> int:
    """Multiplies integers above 0.

    >>> multiply(8, 2)
    16
    """
    _check_counts("commopt.multiply", *factors)
    return math.prod(factors)


def _check_counts(name: str, *counts: object) -> None:
    for value in counts:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} takes integers above 0, got {value!r}")
