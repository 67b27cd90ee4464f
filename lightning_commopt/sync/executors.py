"""Executors that run gradient sync beside backward: a thread for CPU tensors, streams for CUDA tensors."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.futures import Future

from lightning_commopt.sync.gather import map_tensors

_JOIN_TIMEOUT_S = 1.0
"""Time that `WorkerThread.close` waits for its thread. After a backward the thread has nothing left to do, so only a
task that waits for a failed peer takes longer, and waiting for that would delay the end of a fit."""


@dataclass(frozen=True, eq=False)
class BucketFuture:
    """The future of a bucket's average, which DDP waits for, and the buffer that will hold the average."""

    flat: Tensor
    future: Future[Tensor]
    _done: Future[Tensor]

    def complete(self, error: Exception | None) -> None:
        """Completes the future, or fails it; on CUDA it completes when the work now in the current stream is done."""
        if error is None:
            self._done.set_result(self.flat)
        else:
            self._done.set_exception(error)  # type: ignore[arg-type]  # torch annotates the error as a Tensor


class Executor(ABC):
    """Runs tasks in the order of submission. After a task has failed, it runs no further ones.

    A rank whose task has failed is out of step with its peers: its next message would be paired with a wrong one.
    """

    def __init__(self) -> None:
        self._error: Exception | None = None

    @abstractmethod
    def future(self, flat: Tensor) -> BucketFuture:
        """Returns the future of ``flat``, for a task to be submitted."""

    @abstractmethod
    def submit(self, task: Callable[[], None], futures: Sequence[BucketFuture], lane: int = 0) -> None:
        """Starts or queues a task whose end completes ``futures``; tasks of other lanes may overlap with it."""

    @abstractmethod
    def close(self) -> bool:
        """Accepts no more tasks; returns whether all submitted tasks have succeeded."""

    def protect(self, value: object) -> None:  # noqa: B027 - on CPU memory is freed when nobody uses it
        """Keeps the memory of tensors until all lanes are done; for those made outside of tasks or in another lane."""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Returns a context, for a part of a task, that runs after all earlier tasks and before all later ones."""
        yield

    def _run(self, task: Callable[[], None], futures: Sequence[BucketFuture]) -> None:
        if self._error is None:
            try:
                task()
            except Exception as error:
                self._error = error
        for future in futures:
            future.complete(self._error)


class WorkerThread(Executor):
    """Runs tasks on CPU tensors one after another in a thread."""

    def __init__(self) -> None:
        super().__init__()
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], Sequence[BucketFuture]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="commopt-gradient-sync", daemon=True)
        self._thread.start()

    def future(self, flat: Tensor) -> BucketFuture:
        done: Future[Tensor] = Future()
        # DDP waits in C++, which sees the error of a callback but not one set from Python.
        return BucketFuture(flat, done.then(lambda finished: finished.value()), done)

    def submit(self, task: Callable[[], None], futures: Sequence[BucketFuture], lane: int = 0) -> None:
        self._tasks.put((task, futures))

    def close(self) -> bool:
        """Waits briefly for the thread, since a task that no backward has waited for may wait for a failed peer."""
        self._tasks.put(None)
        self._thread.join(_JOIN_TIMEOUT_S)
        if self._error is None and self._thread.is_alive():
            self._error = RuntimeError("gradient sync was closed while a task was still running")
        return self._error is None

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._run(*task)
            del task  # otherwise its bucket would stay in memory until the next task


class SideStreams(Executor):
    """Enqueues tasks on CUDA tensors on streams beside the current one, in the caller's thread.

    Lanes use the streams round-robin: while one bucket is on the wire, the next one is compressed and the previous one
    is decompressed. Collectives are issued in the order of tasks, and NCCL runs the collectives of a group in that
    order. The streams have high priority, so that a bucket need not wait for a kernel of backward that fills the
    device. All hooks of a device share them.

    Args:
        device: device of the tensors.
        num_streams: 2, or 1 if tasks have collectives over several groups, which only a common stream can order.
    """

    def __init__(self, device: torch.device, num_streams: int = 2) -> None:
        super().__init__()
        self._device = device
        self._streams = _side_streams(device)[:num_streams]

    def future(self, flat: Tensor) -> BucketFuture:
        """Returns the future of ``flat``, which the work now in the current stream fills."""
        done: Future[Tensor] = Future(devices=[self._device])
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        return BucketFuture(flat, done, done)

    def submit(self, task: Callable[[], None], futures: Sequence[BucketFuture], lane: int = 0) -> None:
        """Enqueues a task after the work that the current stream had when the futures were made.

        Raises:
            Exception: what this task or an earlier one has raised.
        """
        with torch.cuda.stream(self._streams[lane % len(self._streams)]):
            self._run(task, futures)  # who waits for a future waits for the stream in which it is completed
        if self._error is not None:
            raise self._error

    def close(self) -> bool:
        """Makes the current stream wait for the others."""
        for stream in self._streams:
            torch.cuda.current_stream(self._device).wait_stream(stream)
        return self._error is None

    def protect(self, value: object) -> None:
        """Tells the allocator which streams use the tensors, since the host may free them before the device reads."""
        tensors: list[Tensor] = []
        map_tensors(tensors.append, value)
        for tensor in tensors:
            for stream in self._streams if tensor.is_cuda else ():
                tensor.record_stream(stream)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Makes the current stream wait for the other streams, and at the end the others for it."""
        current = torch.cuda.current_stream(self._device)
        for stream in self._streams:
            current.wait_stream(stream)
        yield
        for stream in self._streams:
            stream.wait_stream(current)


@cache
def _side_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    return torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device, priority=-1)
