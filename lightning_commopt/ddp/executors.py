"""Where exchanges run while backward goes on: a thread for CPU tensors, a stream for CUDA tensors."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.futures import Future

_JOIN_TIMEOUT_S = 5.0


@dataclass(frozen=True, eq=False)
class Promise:
    """The outcome of an exchange that is to come.

    Attributes:
        flat: the buffer that will hold it.
        future: of ``flat``, for DDP.
    """

    flat: Tensor
    future: Future[Tensor]
    _done: Future[Tensor]

    def keep(self) -> None:
        """Says that the buffer holds the outcome. On CUDA, when all that is now in the current stream is done."""
        self._done.set_result(self.flat)

    def break_off(self, error: Exception) -> None:
        """Says that there will be no outcome."""
        self._done.set_exception(error)  # type: ignore[arg-type]  # torch annotates it so


class Driver(ABC):
    """Runs exchanges in the order in which they are submitted."""

    @abstractmethod
    def promise(self, flat: Tensor) -> Promise:
        """Returns the promise of an outcome in ``flat``, for an exchange that is submitted now or later."""

    @abstractmethod
    def submit(self, exchange: Callable[[], None], promises: Sequence[Promise]) -> None:
        """Starts an exchange, or queues it; it keeps these promises."""

    @abstractmethod
    def close(self) -> bool:
        """Takes no more exchanges; returns whether all that were submitted have succeeded."""


class WorkerThread(Driver):
    """Runs exchanges of CPU tensors one after another on a thread."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Sequence[Promise]] | None] = queue.SimpleQueue()
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="commopt-exchange", daemon=True)
        self._thread.start()

    def promise(self, flat: Tensor) -> Promise:
        """Returns the promise of an outcome in ``flat``."""
        done: Future[Tensor] = Future()
        # DDP waits in C++, which sees the error of a callback but not one set from Python.
        return Promise(flat, done.then(lambda finished: finished.value()), done)

    def submit(self, exchange: Callable[[], None], promises: Sequence[Promise]) -> None:
        """Queues an exchange."""
        self._jobs.put((exchange, promises))

    def close(self) -> bool:
        """Waits for the thread, but not for ever: a peer may be gone."""
        self._jobs.put(None)
        self._thread.join(_JOIN_TIMEOUT_S)
        return self._failed is None and not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._run(*job)
            del job  # else its bucket would stay in memory until the next one comes

    def _run(self, exchange: Callable[[], None], promises: Sequence[Promise]) -> None:
        # After a failure this rank is out of step with its peers: nothing more may be sent.
        if self._failed is None:
            try:
                exchange()
            except Exception as error:
                self._failed = error
        for promise in promises:
            if self._failed is None:
                promise.keep()
            else:
                promise.break_off(self._failed)


class SideStream(Driver):
    """Enqueues exchanges of CUDA tensors on a stream of their own, in the caller's thread.

    Args:
        device: of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def promise(self, flat: Tensor) -> Promise:
        """Returns the promise of an outcome in ``flat``, which what is now in the current stream has filled."""
        done: Future[Tensor] = Future(devices=[self._device])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return Promise(flat, done, done)

    def submit(self, exchange: Callable[[], None], promises: Sequence[Promise]) -> None:
        """Enqueues an exchange behind what the current stream had to do when the promises were made."""
        with torch.cuda.stream(self._stream):
            exchange()
            for promise in promises:
                promise.keep()  # records the stream, for whoever waits on the future

    def close(self) -> bool:
        """Makes the current stream wait for this one."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return True
