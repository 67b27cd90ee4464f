"""UnitCalls: times the collectives of FSDP2's units where they are issued, and the computation between them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module

from lightning_commopt.compat.fsdp import units_of
from lightning_commopt.compat.fsdp_calls import around_calls
from lightning_commopt.cost.fsdp2.calls import TimedCall
from lightning_commopt.cost.gradient_times import work_clock


class UnitCalls:
    """Times the calls of a model's comm objects, batch by batch, until `close`.

    On CPU with one thread, the computation between calls is measured in processor time, which other programs do not
    disturb; on CUDA it is unknown, because the host runs ahead.

    Attributes:
        batches: the calls of each batch.
        is_open: whether calls are timed.
    """

    def __init__(self, model: Module, device: torch.device) -> None:
        self.batches: list[list[TimedCall]] = []
        self._indices = {unit: index for index, unit in enumerate(units_of(model))}
        self._clock = work_clock(device) if device.type == "cpu" else None
        self._phase = ""
        self._reached: Any = None
        self._undo = around_calls(model, self._around)
        self.is_open = True

    def close(self) -> None:
        """Restores the units' own comm objects."""
        self._undo()
        self.is_open = False

    def enter(self, phase: str | None) -> None:
        """Must be called when a phase of a step begins."""
        self._phase = phase or ""
        if phase == "forward":
            self.batches.append([])
        self._mark()

    @contextmanager
    def _around(self, operation: str, unit: FSDPModule, num_bytes: int, is_own: bool) -> Iterator[None]:
        after_s = 0.0 if self._clock is None else self._clock.mark() - self._reached
        began_s = time.perf_counter()
        yield
        seconds = time.perf_counter() - began_s
        if self.batches and self._phase in ("forward", "backward"):
            index = self._indices[unit]
            self.batches[-1].append(TimedCall(self._phase, operation, index, num_bytes, is_own, seconds, after_s))
        self._mark()

    def _mark(self) -> None:
        self._reached = None if self._clock is None else self._clock.mark()
