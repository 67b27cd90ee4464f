"""Matrix products in the background, as a training step has them while gradients travel."""

from __future__ import annotations

import threading

import torch

_CPU_SIDE = 256
_CUDA_SIDE = 4096
_QUEUED = 4


class ComputeLoad:
    """Multiplies matrices on a device inside a ``with`` statement: on CPU in one thread, on CUDA on its own stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        side = _CUDA_SIDE if device.type == "cuda" else _CPU_SIDE
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._left = torch.rand(side, side, dtype=dtype, device=device)
        self._product = torch.empty_like(self._left)
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ComputeLoad:
        self._is_over.clear()
        has_begun = threading.Event()
        self._thread = threading.Thread(target=self._multiply, args=(has_begun,), name="commopt-compute", daemon=True)
        self._thread.start()
        has_begun.wait()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._thread is not None
        self._is_over.set()
        self._thread.join()

    def _multiply(self, has_begun: threading.Event) -> None:
        if self._device.type == "cuda":
            self._keep_stream_busy(has_begun)
            return
        torch.set_num_threads(1)  # of this thread
        while not self._is_over.is_set():
            torch.mm(self._left, self._left, out=self._product)
            has_begun.set()

    def _keep_stream_busy(self, has_begun: threading.Event) -> None:
        torch.cuda.set_device(self._device)
        stream = torch.cuda.Stream(self._device)
        events: list[torch.cuda.Event] = []
        with torch.cuda.stream(stream):
            while not self._is_over.is_set():
                torch.mm(self._left, self._left, out=self._product)
                events.append(stream.record_event())
                has_begun.set()
                if len(events) > _QUEUED:
                    events.pop(0).synchronize()
        stream.synchronize()
