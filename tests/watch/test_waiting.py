"""Which functions on a thread's stack mean that it waits for other ranks."""

import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from lightning_commopt.callbacks import all_ranks
from lightning_commopt.sync import store
from lightning_commopt.watch import waiting
from lightning_commopt.watch.waiting import handles_exception_alone, is_in_collective, waits_for_others

_USER, _GRAPH = "project.train step", "torch.autograd.graph backward"
_ALL_RANKS = f"{all_ranks.__name__} take"
_HOOKS = "lightning.pytorch.trainer.call _call_callback_hooks"
_TRAINER = "lightning.pytorch.trainer.call _call_and_handle_interrupt"
_CPU = torch.device("cpu")


def _call_within(stack: list[str], fn: Callable[[], object]) -> None:
    """Calls ``fn`` within functions of the modules and names of a stack, the outermost first."""
    if stack:
        module, name = stack[0].split()
        namespace = {"__name__": module}
        exec(f"def {name}(call, *args):\n    call(*args)", namespace)
        inner = (fn,) if len(stack) == 1 else (_call_within, stack[1:], fn)
        namespace[name](*inner)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("stack", "is_collective", "waits"),
    [
        ([_USER, "torch.distributed.distributed_c10d all_reduce"], True, True),
        ([_USER, "torch.nn.parallel.distributed _distributed_broadcast_coalesced"], True, True),
        ([_USER, "torch.nn.parallel.distributed forward", "torch.nn.modules.linear forward"], False, False),
        ([_USER, "lightning_commopt.sync.diloco.under_way wait"], True, True),
        ([_USER, "lightning_commopt.compressors.channel wait"], True, True),
        ([_USER, _ALL_RANKS], True, True),
        (["torch.distributed.elastic.multiprocessing.api _wrap", "torch.nn.modules.linear forward"], False, False),
        (["torch.distributed.distributed_c10d all_reduce", _USER], False, False),
        ([_USER, _GRAPH], False, True),
        ([_HOOKS, _USER, _GRAPH], False, False),
        ([_HOOKS, _USER, _ALL_RANKS], True, True),
        ([_USER], False, False),
    ],
)
def test_what_a_thread_waits_in(stack: list[str], is_collective: bool, waits: bool) -> None:
    """If it fails, a rank that works on its own is ended, or one that waits for a dead rank is not."""
    with _thread_in(stack) as ident:
        assert (is_in_collective(ident), waits_for_others(ident, _CPU)) == (is_collective, waits)


@pytest.mark.parametrize(
    ("stack", "is_alone"),
    [
        ([_TRAINER, _HOOKS, _USER], True),
        ([_TRAINER, _HOOKS, _USER, "torch.serialization save"], True),
        ([_TRAINER, _HOOKS, _USER, "torch.distributed.distributed_c10d barrier"], False),
        ([_TRAINER, _USER, "lightning_commopt.sync.gather all_ranks_ready", f"{store.__name__} poll"], False),
        ([_USER, "project.upload send"], False),
    ],
)
def test_what_others_wait_for_after_an_exception(stack: list[str], is_alone: bool) -> None:
    """If it fails, a checkpoint on an error is lost, or ranks wait for one that never leaves the Trainer."""
    with _thread_in(stack) as ident:
        assert handles_exception_alone(ident, _CPU) == is_alone


@contextmanager
def _thread_in(stack: list[str]) -> Iterator[int]:
    """Runs a thread within functions of a stack; yields its identifier."""
    lock = threading.Lock()
    with lock:
        thread = threading.Thread(target=_call_within, args=(stack, lock.acquire))
        thread.start()
        ident = thread.ident or 0
        while sys._current_frames()[ident].f_globals["__name__"] != stack[-1].split()[0]:
            time.sleep(0.001)
        yield ident
    thread.join()


def test_the_modules_that_wait_exist() -> None:
    """If it fails, a module was moved in which a rank waits without a collective's frame on its stack."""
    assert all(importlib.util.find_spec(module) for module in (*waiting._WAITING, waiting._POLLING))
