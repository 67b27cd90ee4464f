"""Where gradient sync runs while backward goes on: a thread for CPU tensors, a stream for CUDA tensors."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.futures import Future

_JOIN_TIMEOUT_S = 5.0


@dataclass(frozen=True, eq=False)
class BucketFuture:
    """The average of a bucket that is to come.

    Attributes:
        flat: the buffer that will hold it.
        future: of ``flat``, for DDP.
    """

    flat: Tensor
    future: Future[Tensor]
    _done: Future[Tensor]

    def set_result(self) -> None:
        """Completes the future. On CUDA, for when all that is now in the current stream is done."""
        self._done.set_result(self.flat)

    def set_exception(self, error: Exception) -> None:
        """Makes whoever waits for the future raise."""
        self._done.set_exception(error)  # type: ignore[arg-type]  # torch annotates it so


class Executor(ABC):
    """Runs tasks in the order in which they are submitted. After one has failed it runs no more.

    A rank that failed is out of step with its peers: whatever it sent next would pair with another message of theirs.
    """

    def __init__(self) -> None:
        self._error: Exception | None = None

    @abstractmethod
    def future(self, flat: Tensor) -> BucketFuture:
        """Returns the future of ``flat``, for a task that is submitted now or later."""

    @abstractmethod
    def submit(self, task: Callable[[], None], futures: Sequence[BucketFuture]) -> None:
        """Starts a task, or queues it; its end completes these futures."""

    @abstractmethod
    def close(self) -> bool:
        """Takes no more tasks; returns whether all that were submitted have succeeded."""

    def _run(self, task: Callable[[], None], futures: Sequence[BucketFuture]) -> None:
        if self._error is None:
            try:
                task()
            except Exception as error:
                self._error = error
        for future in futures:
            if self._error is None:
                future.set_result()
            else:
                future.set_exception(self._error)


class WorkerThread(Executor):
    """Runs tasks on CPU tensors one after another on a thread."""

    def __init__(self) -> None:
        super().__init__()
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], Sequence[BucketFuture]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="commopt-gradient-sync", daemon=True)
        self._thread.start()

    def future(self, flat: Tensor) -> BucketFuture:
        """Returns the future of ``flat``."""
        done: Future[Tensor] = Future()
        # DDP waits in C++, which sees the error of a callback but not one set from Python.
        return BucketFuture(flat, done.then(lambda finished: finished.value()), done)

    def submit(self, task: Callable[[], None], futures: Sequence[BucketFuture]) -> None:
        """Queues a task."""
        self._tasks.put((task, futures))

    def close(self) -> bool:
        """Waits for the thread, but not forever: a peer may be gone."""
        self._tasks.put(None)
        self._thread.join(_JOIN_TIMEOUT_S)
        return self._error is None and not self._thread.is_alive()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._run(*task)
            del task  # else its bucket would stay in memory until the next one comes


class SideStream(Executor):
    """Enqueues tasks on CUDA tensors on a stream beside the current one, in the caller's thread.

    All of a device share one stream, so that the collectives of several modules reach it in one order: that in which
    backward calls their hooks.

    Args:
        device: of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._stream = _side_stream(device)

    def future(self, flat: Tensor) -> BucketFuture:
        """Returns the future of ``flat``, which what is now in the current stream has filled."""
        done: Future[Tensor] = Future(devices=[self._device])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return BucketFuture(flat, done, done)

    def submit(self, task: Callable[[], None], futures: Sequence[BucketFuture]) -> None:
        """Enqueues a task behind what the current stream had to do when its futures were made.

        Raises:
            Exception: what this task, or an earlier one, raised.
        """
        with torch.cuda.stream(self._stream):
            self._run(task, futures)  # completing a future records the stream, for whoever waits on it
        if self._error is not None:
            raise self._error

    def close(self) -> bool:
        """Makes the current stream wait for this one."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return self._error is None


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
