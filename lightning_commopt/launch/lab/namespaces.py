"""Linux namespaces that live as long as a process of this package, and what a machine needs for them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

_LIMIT_S = 30  # time limit of each command that sets up the lab
_CLOSE_S = 10  # namespaces that have not ended by then are killed
_PACKAGES = {
    "iproute2": ("ip", "tc"),
    "util-linux": ("mount", "nsenter", "setpriv", "taskset", "unshare"),
    "coreutils": ("cat", "true"),
}
# Root needs no user namespace. Other users become root in a new one, if the kernel allows it.
_UNSHARE_OPTIONS: tuple[tuple[str, ...], ...] = ((), ("--user", "--map-root-user"))
_NETWORK = ("--mount", "--net")
_PROCESSES = ("--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_DEVICES = {
    "a pair of network devices (veth)": "ip link add eth0 type veth peer name eth1",
    "a network bridge": "ip link add bridge0 type bridge",
    "a limit to the rate (htb)": "tc qdisc add dev lo root htb",
    "a mount of its own": "mount -t tmpfs tmpfs /run",
}


class LabError(RuntimeError):
    """This machine cannot create the network lab; the message names what is missing."""


def why_not() -> str | None:
    """Returns why the network lab does not work on this machine; None if it works."""
    try:
        find_unshare_options()
    except LabError as error:
        return str(error)
    return None


def find_unshare_options() -> tuple[str, ...]:
    """Returns the options with which ``unshare`` can create namespaces here: none for root.

    Raises:
        LabError: namespaces cannot be created here.
    """
    if sys.platform != "linux":
        raise LabError(f"the network lab needs Linux, this is {sys.platform}")
    for package, names in _PACKAGES.items():
        for name in names:
            if program(name) is None:
                raise LabError(f"the network lab needs the program {name!r}: install the package {package}")
    refusals = []
    for unshare_options in _UNSHARE_OPTIONS:
        refusal = _why_refused(unshare_options, ("true",))
        if refusal is None:
            break
        refusals.append(refusal)
    else:
        raise LabError(
            "the network lab needs root with CAP_SYS_ADMIN and CAP_NET_ADMIN, or a kernel that allows unprivileged "
            f"user namespaces; both are refused: {'; '.join(refusals)}"
        )
    for capability, command in _DEVICES.items():
        refusal = _why_refused(unshare_options, command.split())
        if refusal is not None:
            raise LabError(f"the network lab needs {capability}, which is refused here: {refusal}")
    return unshare_options


def program(name: str) -> str | None:
    """Returns the path of a program, None if it is missing; ``ip`` is often in a folder for root only."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))


def path_of(name: str) -> str:
    """Returns the path of a program that `find_unshare_options` has found."""
    path = program(name)
    assert path is not None, f"{name} was there when the lab was opened"
    return path


def run_program(*command: str) -> None:
    """Runs a short command to its end.

    Raises:
        LabError: it failed; the message has its error.
    """
    refusal = _error_of_command(command)
    if refusal is not None:
        raise LabError(f"could not set up the network lab: {' '.join(command)}: {refusal}")


class Keeper:
    """Keeps new namespaces alive until it is closed, or until the thread that made it ends, even by SIGKILL.

    It is a process of ``cat``. It answers when the namespaces exist, and ends with its input when this process ends. If
    a fork of this process still holds the input, the kernel kills it at the end of the thread. The namespaces have no
    name outside and end with their last process.

    Args:
        unshare_options: options for ``unshare``, from `find_unshare_options`.
        within: the keeper of the namespaces around the new ones, if any.

    Attributes:
        pid: a process in the namespaces.

    Raises:
        LabError: the namespaces could not be made.
    """

    def __init__(self, unshare_options: Sequence[str], within: Keeper | None = None) -> None:
        self._unshare_options = tuple(unshare_options)
        self._has_processes = within is not None
        outside, kinds = ((), (*unshare_options, *_NETWORK)) if within is None else (within.enter(), _PROCESSES)
        setpriv, unshare = (path_of("setpriv"), "--pdeathsig", "KILL"), path_of("unshare")
        command = (*setpriv, *outside, unshare, *kinds, path_of("cat"))
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must not reach it, as it has to end after the ranks
        )
        self.pid = self._process.pid
        try:
            self._await_answer()
        except BaseException:
            self.close()
            raise

    def enter(self, host: str | None = None, folder: str | None = None) -> tuple[str, ...]:
        """Returns the prefix of a command to run it in these namespaces.

        Args:
            host: name of a network namespace; None for the one in which hosts were made.
            folder: folder in which it runs; None for the root folder.
        """
        root = f"/proc/{self.pid}/root"
        network = "--net" if host is None else f"--net={root}/run/netns/{host}"
        user = ("--user", "--preserve-credentials") if self._unshare_options else ()
        processes = (f"--pid=/proc/{self.pid}/ns/pid_for_children",) if self._has_processes else ()
        working_folder = () if folder is None else (f"--wd={root}{folder}",)
        return (
            path_of("nsenter"),
            "--target",
            str(self.pid),
            *user,
            "--mount",
            *processes,
            network,
            *working_folder,
            "--",
        )

    def close(self) -> None:
        """Ends the namespaces; returns when no process is left in them."""
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        try:
            # The first process ends with its input, and the kernel ends all others before it notifies its parent.
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _await_answer(self) -> None:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        with suppress(BrokenPipeError):
            process.stdin.write(b"\n")
            process.stdin.flush()
        if process.stdout.readline() != b"\n":
            error = process.stderr.read().decode(errors="replace").strip()
            raise LabError(f"could not set up the network lab: {error or 'its first process ended at once'}")


def _why_refused(unshare_options: Sequence[str], command: Sequence[str]) -> str | None:
    """Returns the error of a command in new namespaces of every kind; None if it succeeded."""
    namespaces = tuple(dict.fromkeys((*_NETWORK, *_PROCESSES)))
    return _error_of_command(
        (path_of("unshare"), *unshare_options, *namespaces, "--", path_of(command[0]), *command[1:])
    )


def _error_of_command(command: Sequence[str]) -> str | None:
    try:
        answer = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_LIMIT_S} s"
    if answer.returncode == 0:
        return None
    return answer.stderr.strip() or f"ended with status {answer.returncode}"
