"""The process that ranks on the fake device are forked from: it has loaded the device and imported torch.

    python -m fake_device.launcher DESCRIPTOR DRIVER RUNTIME OPERATORS

Through the pipe with that descriptor come jobs, and go answers. It ends when nobody has the other end any more.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tempfile
from multiprocessing.connection import Connection
from typing import Any

from fake_device.loading import load_device, take_device

_SLOW = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor")  # what DDP and FSDP2 import when used


def main() -> None:
    descriptor, driver, runtime, operators = sys.argv[1:]
    load_device(driver, runtime)
    _prepare(operators)
    with Connection(int(descriptor)) as jobs:
        while True:
            try:
                job = jobs.recv()
            except EOFError:
                return
            jobs.send(_answer(*job))


def _prepare(operators: str) -> None:
    """Takes the device, and imports what ranks need."""
    from lightning_commopt.compressors.kernels import dispatch

    take_device(operators)
    dispatch.do_without_triton()  # whose kernels nothing can run
    for module in _SLOW:
        importlib.import_module(module)


def _answer(fn: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, str | None]:
    """Returns what all ranks returned, or why not."""
    from lightning_commopt.testing import ranks

    ranks.PROCESSES = multiprocessing.get_context("fork")  # type: ignore[assignment]  # ranks need what is loaded here
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FAKE_DEVICE_FOLDER"] = folder
        try:
            return ranks.run_ranks(fn, *args, backend="nccl", **options), None
        except Exception as error:
            return None, f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
