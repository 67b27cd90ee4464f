"""The order that the watches need among their timeouts and intervals: see `lightning_commopt/watch/times.py`."""

import inspect
import runpy
from itertools import pairwise
from types import SimpleNamespace

import pytest
from torch.distributed.constants import default_pg_timeout

from lightning_commopt.callbacks import HangMonitor
from lightning_commopt.strategy import lightning_launcher as launcher
from lightning_commopt.watch import times as patched
from lightning_commopt.watch.hangs.observation import _MAX_WORKERS

assert patched.__file__ is not None
times = SimpleNamespace(**runpy.run_path(patched.__file__))  # as it is in the file: other tests have shortened times
AFTER_S = inspect.signature(HangMonitor).parameters["after_s"].default
TIMEOUT_S = default_pg_timeout.total_seconds()

SNAPSHOT_S = 2 * times.ANSWER_S + _MAX_WORKERS * (times.STACK_S + times.QUIET_S)
"""What one snapshot of a rank takes at most."""
DEATH_SEEN_S = 2 * times.HANG_LOOK_S + times.LAST_MESSAGE_S
"""What a watcher takes to see that its rank has died without a word."""
FIT_END_S = 2 * times.FIT_LOOK_S + times.STALLED_S
"""What FitWatch takes from a death until it knows that its rank waits in vain."""

ORDERS = {
    "looks at the start": (times.JOIN_ANSWER_S, times.JOIN_LOOK_S, times.JOIN_GRACE_S),
    "a report of the start comes after a look": (times.JOIN_LOOK_S + 2 * times.JOIN_TRY_S, times.JOIN_REPORT_AFTER_S),
    "every rank reads a failure before one is ended": (times.JOIN_LOOK_S + times.JOIN_TRY_S, times.JOIN_GRACE_S),
    "a rank that fails early gets rank 0's answer": (times.JOIN_ANSWER_S, times.JOIN_CLOSE_S / 2),
    "absent in more than one look": (2 * times.PROCESSES_LOOK_S, times.ABSENT_S),
    "one late look is not a stall": (times.FIT_LOOK_S, times.STALLED_S, times.FIT_GRACE_S),
    "a lifeline delays no look for long": (times.LIFELINE_CONNECT_S, times.FIT_GRACE_S),
    "a death is reported before ranks are ended": (DEATH_SEEN_S + times.DEATH_S, times.FIT_GRACE_S),
    "a death is seen before another is reported": (DEATH_SEEN_S, times.DEATH_S),
    "ranks of a sweep show gloo's own error": (times.FIT_GRACE_S, launcher._FIT_GRACE_S),
    "a fit explains its end before the sweep ends it": (FIT_END_S + launcher._FIT_GRACE_S, launcher._GRACE_S),
    "so does a start": (times.PROCESSES_LOOK_S + times.ABSENT_S + times.JOIN_GRACE_S, launcher._GRACE_S),
    "a look that is late has still seen progress": (times.HANG_LOOK_S, times.MOVED_S),
    "a busy machine is not suspended": (10 * times.HANG_LOOK_S, times.PAUSE_S, AFTER_S),
    "watchers look between two inquiries": (times.HANG_LOOK_S, times.CONFIRM_S, times.ASK_AGAIN_S, AFTER_S),
    "a report names a rank before the timeout does not": (times.SLOW_FACTOR * AFTER_S, TIMEOUT_S),
    "a failed rank has more time than another": (times.ORDERLY_S, times.FAILED_S),
    "NCCL is given a second": (times.RAS_EXTRA_S, times.RAS_S - 1 + 1e-9),
    "a thread can show that it holds the GIL": (times.HOLDS_GIL_S, times.ANSWER_S),
    "a stack is whole in time": (times.PROCESS_POLL_S, times.QUIET_S, times.STACK_S),
    "an exit is looked for more than once": (times.EXIT_POLL_S, times.EXIT_S),
    "samples of CPU time are taken in looks": (times.HANG_LOOK_S, times.COMPUTING_WINDOW_S / 4),
    "two snapshots": (2 * SNAPSHOT_S, times.STATE_S),
    "watchers are greeted twice": (times.CONNECT_S + 2 * times.HELLO_ANSWER_S, times.GREET_S, times.MEET_S),
    "nobody is waited for in the end": (times.MEET_FIRST_POLL_S, times.MEET_LAST_POLL_S),
}


@pytest.mark.parametrize("name", ORDERS)
def test_orders(name: str) -> None:
    """If it fails, a number was changed without those that must be above or below it."""
    assert all(lower < upper for lower, upper in pairwise(ORDERS[name])), f"{name}: {ORDERS[name]}"


def test_all_times_are_positive() -> None:
    """If it fails, a watch never sleeps, or a limit is over before it has begun."""
    numbers = {name: value for name, value in vars(times).items() if name.isupper()}
    assert len(numbers) > 40
    assert all(value > 0 for value in numbers.values())
