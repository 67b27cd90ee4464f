"""What a machine must have for a lab, and that a lab dies with the process that holds it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lightning_commopt.launch.lab import LabError, NetLab, namespaces, why_not
from support.known import known
from support.lab_traces import SAY_NAMESPACES, are_empty, machine_traces, namespaces_in, processes_in

HOLDER = f"""
import os, time
from lightning_commopt.launch.lab import NetLab

def fork_and_stay():
    if os.fork() == 0:
        time.sleep(600)

with NetLab(3, "100mbit") as lab:
    PREPARE
    lab.run(["sh", "-c", {SAY_NAMESPACES + "; sleep 600"!r}], on_output=lambda rank, output: os.write(1, output))
"""


@contextmanager
def holder_of_a_lab(prepare: str = "") -> Iterator[tuple["subprocess.Popen[str]", set[str]]]:
    """Starts a process that holds a lab of three ranks; gives it and the lab's namespaces."""
    code = HOLDER.replace("PREPARE", prepare)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as holder:
        assert holder.stdout is not None
        spaces = namespaces_in("".join(holder.stdout.readline() for _ in range(3)))
        assert len(spaces) == 3 + 1 + 1, "a network for each host, and processes and mounts that they share"
        assert len(processes_in(spaces)) >= 3 * 2
        yield holder, spaces


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.usefixtures("lab_machine")
def test_nothing_outlives_the_holder(number):
    """If it fails, a killed benchmark leaves ranks that compute, and devices."""
    before = machine_traces()
    with holder_of_a_lab() as (holder, spaces):
        holder.send_signal(number)
        assert holder.wait(30) == -number
        assert are_empty(spaces)
    assert machine_traces() == before


@pytest.mark.exhaustive
@pytest.mark.usefixtures("lab_machine")
def test_a_fork_that_outlives_the_holder_does_not_keep_the_lab():
    """If it fails, a hanging worker of a killed process, which has a copy of its pipes, keeps the lab."""
    with holder_of_a_lab("fork_and_stay()") as (holder, spaces):
        holder.kill()
        try:
            assert holder.wait(30) == -signal.SIGKILL
            assert are_empty(spaces)
        finally:
            os.killpg(holder.pid, signal.SIGKILL)


@pytest.mark.parametrize("missing", ["ip", "tc", "unshare"])
def test_a_missing_program_is_named_with_its_package(monkeypatch, missing):
    monkeypatch.setattr(namespaces, "program", lambda name: None if name == missing else name)
    package = "util-linux" if missing == "unshare" else "iproute2"
    expected = f"the network lab needs the program '{missing}': install the package {package}"
    assert why_not() == expected
    with pytest.raises(LabError, match=expected), NetLab(2):
        pass


def test_another_system_is_named(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert why_not() == "the network lab needs Linux, this is darwin"


@pytest.mark.usefixtures("lab_machine")
def test_what_the_kernel_refuses_is_reported(monkeypatch):
    monkeypatch.setattr(namespaces, "_UNSHARE_OPTIONS", (("--setgroups", "nonsense"), ("--map-user", "nonsense")))
    reason = known(why_not())
    assert "needs root with CAP_SYS_ADMIN" in reason
    assert reason.count("nonsense") == 2
    monkeypatch.undo()
    monkeypatch.setitem(namespaces._DEVICES, "a warp drive", "ip link add warp0 type nonsense")
    reason = known(why_not())
    assert reason.startswith("the network lab needs a warp drive, which is refused here: ")


@pytest.mark.usefixtures("lab_machine")
def test_a_set_up_that_fails_says_the_command_and_leaves_nothing(monkeypatch):
    before = machine_traces()
    monkeypatch.setattr("lightning_commopt.launch.lab.lab._LIMITER", ("nonsense",))
    with (
        pytest.raises(LabError, match=r"could not set up the network lab: .*tc .* nonsense: "),
        NetLab(2, "1gbit"),
    ):
        pass
    assert machine_traces() == before
