import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from lightning_commopt.launch.process import (
    InterruptedRun,
    RankError,
    raise_signals,
    run_beneath,
    run_in_group,
    run_ranks,
)
from support.cross_section import sampled
from support.process_groups import is_group_gone

PYTHON = (sys.executable, "-u", "-c")

# Says the number of its own process group and of a child that would sleep for ever.
WITH_CHILD = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
os.write(1, b"%d\\n" % os.getpgrp())
"""


def run(code, grace_s=5, on_output=None):
    output: list[bytes] = []

    def on_bytes(data: bytes) -> None:
        output.append(data)
        if on_output is not None:
            on_output(data)

    try:
        return run_in_group((*PYTHON, code), os.environ, on_bytes, grace_s), b"".join(output)
    except InterruptedRun as interrupted:
        return interrupted, b"".join(output)


@pytest.mark.parametrize(
    ("code", "status", "of_shell"),
    [("", 0, 0), ("raise SystemExit(3)", 3, 3), ("import os; os.kill(os.getpid(), 9)", -9, 137)],
)
def test_the_status_is_that_of_the_program(code, status, of_shell):
    assert run(code) == (status, b"")
    assert run_beneath((*PYTHON, code), os.environ) == of_shell


def test_all_output_arrives_in_order():
    code = "import sys\nfor i in range(20000): print(i, file=sys.stderr if i % 2 else sys.stdout)"
    status, output = run(code)
    assert status == 0
    assert output == b"".join(b"%d\n" % i for i in range(20000))


def test_a_child_that_outlives_the_program_is_killed():
    status, output = run(WITH_CHILD)
    assert status == 0
    assert is_group_gone(int(output))


def test_a_child_that_writes_without_end_does_not_keep_us():
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'while True: print(1)'])"
    assert run(code)[0] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_program_and_children(number):
    before = signal.getsignal(number)
    outcome, output = run(WITH_CHILD + "time.sleep(600)", on_output=lambda _: os.kill(os.getpid(), number))
    assert isinstance(outcome, InterruptedRun)
    assert outcome.signal == number
    assert is_group_gone(int(output.split()[0]))
    assert signal.getsignal(number) == before


def test_a_program_that_ignores_signals_is_killed():
    ignoring = "for n in (2, 15, 1): signal.signal(n, signal.SIG_IGN)\n"
    code = WITH_CHILD.replace("os.write(", ignoring + "os.write(") + "time.sleep(600)"
    outcome, output = run(code, grace_s=0.2, on_output=lambda _: os.kill(os.getpid(), signal.SIGINT))
    assert isinstance(outcome, InterruptedRun)
    assert is_group_gone(int(output.split()[0]))


def test_signals_that_were_ignored_stay_ignored(monkeypatch):
    """If it fails, a sweep under nohup ends when its terminal closes."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        status, output = run("print(1)", on_output=lambda _: os.kill(os.getpid(), signal.SIGHUP))
        assert (status, output) == (0, b"1\n")
        with raise_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_a_program_that_inherits_an_ignored_interrupt_ends_in_order():
    """A shell starts what it puts into the background so. If it fails, the program is killed before it tidies up."""
    code = """
import os, signal, sys, time
def stop(*_):
    os.write(1, b"tidy")
    sys.exit()
signal.signal(signal.SIGTERM, stop)
os.write(1, b"ready ")
time.sleep(600)
"""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        outcome, output = run(
            code, 600, lambda data: os.kill(os.getpid(), signal.SIGTERM) if b"ready" in data else None
        )
    finally:
        signal.signal(signal.SIGINT, previous)
    assert isinstance(outcome, InterruptedRun)
    assert output == b"ready tidy"


def test_a_second_signal_does_not_wait():
    ignoring = "for n in (2, 15, 1): signal.signal(n, signal.SIG_IGN)\n"
    code = WITH_CHILD.replace("os.write(", ignoring + "os.write(") + "time.sleep(600)"

    def twice(_: bytes) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)

    outcome, output = run(code, grace_s=600, on_output=twice)
    assert isinstance(outcome, InterruptedRun)
    assert outcome.signal == signal.SIGINT
    assert is_group_gone(int(output.split()[0]))


def test_it_runs_beside_the_main_thread_too():
    returned: list[object] = []
    thread = threading.Thread(target=lambda: returned.append(run("print(1)")))
    thread.start()
    thread.join(60)
    assert returned == [(0, b"1\n")]


def test_only_the_first_signal_is_raised():
    """If it fails, a second Ctrl-C stops the removal of what the first one left."""
    cleaned: list[bool] = []

    def stop_twice() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            cleaned.append(True)

    with raise_signals(), pytest.raises(InterruptedRun) as caught:
        stop_twice()
    assert caught.value.signal == signal.SIGTERM
    assert cleaned
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_rank_that_fails_ends_the_others():
    """If it fails, a bench whose rank has failed leaves processes that disturb the next one."""
    output: list[tuple[int, bytes]] = []
    failing = "import sys, time; print('it broke', flush=True); time.sleep(1); sys.exit(3)"
    programs = [((*PYTHON, code), os.environ) for code in (WITH_CHILD + "time.sleep(600)", failing)]
    with pytest.raises(RankError, match=r"(?s)rank 1 ended with status 3; .*it broke") as caught:
        run_ranks(programs, on_output=lambda *part: output.append(part))
    assert (caught.value.rank, caught.value.status) == (1, 3)
    assert b"".join(part for rank, part in output if rank == 0).decode() == caught.value.outputs[0]
    assert is_group_gone(int(caught.value.outputs[0]))


def test_ranks_that_take_too_long_are_ended():
    programs = [((*PYTHON, "import time; time.sleep(600)"), os.environ)] * 2
    with pytest.raises(RankError, match=r"rank 0 still ran after 0\.5 s") as caught:
        run_ranks(programs, on_output=lambda *_: None, timeout_s=0.5)
    assert caught.value.status is None
    assert run_ranks([((*PYTHON, ""), os.environ)] * 2, on_output=lambda *_: None) == ["", ""]


def test_a_signal_while_the_command_is_started_reaches_it(monkeypatch):
    """If it fails, a job that is ended right at its start runs until its container is killed."""
    start = subprocess.Popen

    def interrupted(*args, **kwargs):
        process = start(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGTERM)
        return process

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    assert run_beneath((*PYTHON, "import time; time.sleep(60)"), os.environ) == 128 + signal.SIGTERM


SAVES_FIRST = """
import signal, sys, time
def end(number, frame):
    time.sleep(1)
    sys.exit(number)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, end)
print("ready", flush=True)
time.sleep(600)
"""
BENEATH = f"""
import os, sys
from lightning_commopt.launch.process import run_beneath
sys.exit(run_beneath([sys.executable, "-c", {SAVES_FIRST!r}], os.environ))
"""


@pytest.mark.parametrize(
    ("number", "kill"),
    sampled(
        [(signal.SIGINT, os.killpg), (signal.SIGUSR1, os.killpg), (signal.SIGTERM, os.kill)],
        by_default=[(signal.SIGUSR1, os.killpg)],
    ),
)
def test_a_program_decides_what_a_signal_does(number, kill):
    """If it fails, Ctrl-C or a scheduler kills a fit before its checkpoint, or leaves one that nobody waits for."""
    ours = subprocess.Popen((*PYTHON, BENEATH), stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert ours.stdout is not None
        assert ours.stdout.readline() == b"ready\n"
        kill(ours.pid, number)
        assert ours.wait(timeout=60) == number
    finally:
        with ours, suppress(ProcessLookupError):
            os.killpg(ours.pid, signal.SIGKILL)
