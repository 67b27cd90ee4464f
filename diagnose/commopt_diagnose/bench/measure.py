"""Times all cases on the ranks of a process group, round-robin."""

from __future__ import annotations

import contextlib
import gc
import math
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist

from commopt_diagnose.bench.cases import cases_of, num_ranks_of_scopes
from commopt_diagnose.bench.operations import Call, Ranks, prepare, prepare_hook, ranks_by_scope
from commopt_diagnose.bench.result import Case, Row
from commopt_diagnose.bench.settings import BenchSettings
from commopt_diagnose.bench.start import OnProgress
from lightning_commopt.compressors.channel import Channel

_BURST_SHARE_BYTES = 2**26  # a message of this size is much larger than the burst that a rate limiter allows
_MAX_ITERS = 100_000  # fills the default block of 0.1 s with calls of 1 µs; none is faster

# Sides of the square matrices that are multiplied under the load "compute".
_CPU_SIDE = 256  # 256 KiB in float32
_CUDA_SIDE = 4096  # 64 MiB in float32, enough work for a whole GPU
_QUEUED = 4  # products that the host runs ahead


@dataclass
class _Entry:
    """A case that is prepared and measured."""

    case: Case
    call: Call | None = None
    error: str | None = None
    num_wrong: int | None = None
    call_s: float = 0.0  # time of a call on the slowest rank, mostly of the last blocks; 0 before it was run
    num_iters: int = 0  # calls in the last block


def measure(settings: BenchSettings, device: torch.device, ranks_per_node: int, on_progress: OnProgress) -> list[Row]:
    """Returns a row for each case, the same on every rank. All ranks of the default group, with gloo, must call it.

    A repetition of a case is a block of calls. One untimed call uses up the burst that a rate limiter allows and warms
    the memory; then the ranks synchronize, and the clock starts. The time of a block is the slowest rank's, by events
    of the device on CUDA. Cases are measured round-robin, so that a drift of the machine affects all of them.

    Raises:
        ValueError: a setting does not fit these ranks.
    """
    cases = cases_of(settings, num_ranks_of_scopes(settings, dist.get_world_size(), ranks_per_node))
    scopes, channel = ranks_by_scope(ranks_per_node)
    num_bytes = max(case.size_bytes for case in cases)
    # Two buffers, as slices of one might not be aligned for all dtypes.
    memory = [torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    bench = _Bench(settings, device, ranks_per_node, scopes, channel, memory)
    total = len(cases) * (1 + settings.num_repetitions)
    # A garbage collection would count as time of the call that it interrupts.
    gc.disable()
    try:
        entries = []
        for number, case in enumerate(cases):
            on_progress(number, total, case.label)
            entries.append(bench.begin(case))
        times_s = torch.zeros(settings.num_repetitions, len(cases), dtype=torch.float64, device="cpu")
        for repetition in range(settings.num_repetitions):
            for number, entry in enumerate(entries):
                on_progress((1 + repetition) * len(cases) + number, total, entry.case.label)
                times_s[repetition, number] = bench.block(entry)
    finally:
        gc.enable()
    dist.all_reduce(times_s, dist.ReduceOp.MAX)
    return [_row(entry, times_s[:, number].tolist()) for number, entry in enumerate(entries)]


@dataclass(frozen=True)
class _Bench:
    """What all cases share."""

    settings: BenchSettings
    device: torch.device
    ranks_per_node: int
    scopes: dict[str, Ranks]
    channel: Channel
    memory: Sequence[torch.Tensor]  # two buffers, which all cases share

    def begin(self, case: Case) -> _Entry:
        """Prepares a case, runs it, checks its result, and measures how long a call takes."""
        entry = _Entry(case)
        for attempt in (self._prepare, self._run_first):
            try:
                attempt(entry)
            except (RuntimeError, ValueError) as error:
                # This backend may not support the case. The other cases are still measured.
                entry.error = str(error).strip().partition("\n")[0] or type(error).__name__
            # All ranks leave out a case that failed on any of them.
            if reduce_value(entry.error is not None, dist.ReduceOp.MAX):
                entry.error = entry.error or "failed on another rank"
                return entry
        assert entry.call is not None
        if self.settings.is_checked:
            entry.num_wrong = int(reduce_value(entry.call.num_wrong(), dist.ReduceOp.SUM))
        warm_ups_s = [self._time(entry.call, 1) for _ in range(self.settings.num_warmups)]
        entry.call_s = reduce_value(min(warm_ups_s), dist.ReduceOp.MAX)
        return entry

    def block(self, entry: _Entry) -> float:
        """Returns the seconds of a call on this rank, the mean over a block; 0 if the case failed."""
        if entry.call is None or entry.error is not None:
            return 0.0
        if entry.case.operation == "comm_hook":
            entry.call.fill()  # sums of other cases, which use the same memory, may have overflowed
        with compute_load(self.device) if entry.case.load == "compute" else contextlib.nullcontext():
            # The untimed call is left out if it takes long and its message is much larger than a burst.
            if entry.case.size_bytes < _BURST_SHARE_BYTES or entry.call_s < self.settings.block_s:
                entry.call.run()
                self._synchronize()
            # A busy machine may need many times as long for a call as it did in the block before.
            fitting = math.ceil(self.settings.block_s / max(entry.call_s, 1e-9))
            entry.num_iters = self.settings.num_iters or max(1, min(_MAX_ITERS, fitting))
            time_s = self._time(entry.call, entry.num_iters) / entry.num_iters
        # The mean with what was known keeps a single slow block from making the next one too short to be exact.
        entry.call_s = (entry.call_s + reduce_value(time_s, dist.ReduceOp.MAX)) / 2
        return time_s

    def _prepare(self, entry: _Entry) -> None:
        case, ranks = entry.case, self.scopes[entry.case.scope]
        if case.operation != "comm_hook":
            entry.call = prepare(case, ranks, self.memory, self.settings.root)
        elif case.scope == "all":
            entry.call = prepare_hook(case, ranks, self.channel, self.memory, self.ranks_per_node)
        else:
            raise ValueError("a comm hook runs over all ranks, so its only scope is all")

    def _run_first(self, entry: _Entry) -> None:
        assert entry.call is not None
        entry.call.fill()
        entry.call.run()
        self._synchronize()

    def _time(self, call: Call, num_iters: int) -> float:
        """Returns the seconds that some calls take after all ranks have synchronized.

        The clock starts at once: threads that wait fall asleep in microseconds, and the first call would have to wake
        them.
        """
        run = call.run
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            _synchronize_ranks()
            start.record()
            for _ in range(num_iters):
                run()
            end.record()
            end.synchronize()
            elapsed_s: float = start.elapsed_time(end) / 1e3
            return elapsed_s
        _synchronize_ranks()
        started = time.perf_counter()
        for _ in range(num_iters):
            run()
        return time.perf_counter() - started

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _row(entry: _Entry, times_s: list[float]) -> Row:
    if entry.error is not None:
        return Row(case=entry.case, error=entry.error)
    return Row(case=entry.case, times_s=times_s, num_iters=entry.num_iters, num_wrong=entry.num_wrong)


def _synchronize_ranks() -> None:
    dist.all_reduce(torch.zeros(1, device="cpu"))


def reduce_value(value: float, redop: dist.ReduceOp.RedOpType) -> float:
    """Returns the values of all ranks, reduced. All ranks must call it."""
    values = torch.tensor([value], dtype=torch.float64, device="cpu")
    dist.all_reduce(values, redop)
    return float(values.item())


@contextlib.contextmanager
def compute_load(device: torch.device) -> Iterator[None]:
    """Multiplies matrices inside a ``with`` statement, as a training step does while gradients travel.

    On CPU they are multiplied by one thread, on CUDA in a stream of their own.

    Raises:
        RuntimeError: a product failed, so that what was measured is without a load.
    """
    is_cuda = device.type == "cuda"
    side, dtype = (_CUDA_SIDE, torch.bfloat16) if is_cuda else (_CPU_SIDE, torch.float32)
    matrix = torch.rand(side, side, dtype=dtype, device=device)
    product = torch.empty_like(matrix)
    has_begun, is_over = threading.Event(), threading.Event()

    def multiply() -> None:
        torch.set_num_threads(1)  # torch keeps this number for each thread
        while not is_over.is_set():
            torch.mm(matrix, matrix, out=product)
            has_begun.set()

    def keep_stream_busy() -> None:
        torch.cuda.set_device(device)
        stream = torch.cuda.Stream(device)
        events: list[torch.cuda.Event] = []
        with torch.cuda.stream(stream):
            while not is_over.is_set():
                torch.mm(matrix, matrix, out=product)
                events.append(stream.record_event())
                has_begun.set()
                if len(events) > _QUEUED:
                    events.pop(0).synchronize()
        stream.synchronize()

    with ThreadPoolExecutor(1, "commopt-compute") as thread:
        work = thread.submit(keep_stream_busy if is_cuda else multiply)
        work.add_done_callback(lambda _: has_begun.set())  # a full GPU may fail before it begins
        has_begun.wait()
        try:
            yield
        finally:
            is_over.set()
        work.result()
