"""Where exchanges run while backward goes on: a thread for CPU tensors, a stream for CUDA tensors."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from torch.futures import Future

_JOIN_TIMEOUT_S = 5.0


class Driver(ABC):
    """Runs exchanges in the order in which they are submitted."""

    @abstractmethod
    def submit(self, exchange: Callable[[], Tensor]) -> Future[Tensor]:
        """Starts an exchange, or queues it, and returns the future of its result."""

    @abstractmethod
    def close(self) -> bool:
        """Takes no more exchanges; returns whether all that were submitted have succeeded."""


class WorkerThread(Driver):
    """Runs exchanges of CPU tensors one after another on a thread."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Tensor], Callable[[], Tensor]] | None] = queue.SimpleQueue()
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="commopt-exchange", daemon=True)
        self._thread.start()

    def submit(self, exchange: Callable[[], Tensor]) -> Future[Tensor]:
        """Queues an exchange."""
        done: Future[Tensor] = Future()
        self._jobs.put((done, exchange))
        # DDP waits in C++, which sees the error of a callback but not one set from Python.
        return done.then(lambda finished: finished.value())

    def close(self) -> bool:
        """Waits for the thread, but not for ever: a peer may be gone."""
        self._jobs.put(None)
        self._thread.join(_JOIN_TIMEOUT_S)
        return self._failed is None and not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._run(*job)
            del job  # else its bucket would stay in memory until the next one comes

    def _run(self, done: Future[Tensor], exchange: Callable[[], Tensor]) -> None:
        # After a failure this rank is out of step with its peers: nothing more may be sent.
        if self._failed is None:
            try:
                done.set_result(exchange())
            except Exception as error:
                self._failed = error
            else:
                return
        done.set_exception(self._failed)  # type: ignore[arg-type]  # torch annotates it so


class SideStream(Driver):
    """Enqueues exchanges of CUDA tensors on a stream of their own, in the caller's thread.

    Args:
        device: of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def submit(self, exchange: Callable[[], Tensor]) -> Future[Tensor]:
        """Enqueues an exchange behind what the current stream has to do."""
        done: Future[Tensor] = Future(devices=[self._device])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            done.set_result(exchange())  # records the stream, for whoever waits on the future
        return done

    def close(self) -> bool:
        """Makes the current stream wait for this one."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return True
