"""ForkServer: starts processes in which everything is imported already, otherwise like ``python -m``.

Importing torch and Lightning takes longer than a short training. The server is a fork of a process that has imported
them and done nothing else; the processes that it starts are forks of it, which run a module from its beginning.
"""

from __future__ import annotations

import ctypes
import gc
import io
import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from lightning_commopt.compat.lightning import renew_rank
from lightning_commopt.launch.forked_process import ForkedProcess, run_to_exit

_PR_SET_CHILD_SUBREAPER = 36
_SEED_OF_EVERY_PROCESS = 67280421310721  # of older torch; newer ones draw one
_preloaded: ForkServer | None = None


class ForkServer:
    """A fork of this process as it is now, which forks further ones and ends with this process.

    Make it early: before threads of our own are started, CUDA is used or state of a run exists. The processes run the
    module, like ``python -m``.
    """

    def __init__(self, module: str) -> None:
        self.module = module
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else their buffers are written twice
        self._socket, requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self._socket.close()
            _serve(requests, module)
        requests.close()

    def runs(self, command: Sequence[str]) -> bool:
        """Returns whether this server can start a command."""
        return list(command[:3]) == [sys.executable, "-m", self.module]

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        folder: str | None = None,
        namespaces: Sequence[str] = (),
        cores: Sequence[int] = (),
        is_session: bool = False,
        is_server: bool = False,
    ) -> ForkedProcess:
        """Starts a process, like ``subprocess.Popen``.

        Args:
            command: that the server `runs`.
            env: the whole environment.
            folder: to start in; None for ours.
            namespaces: files of Linux namespaces to enter, in this order.
            cores: to run on; empty for all. Only with namespaces.
            is_session: lead a session of its own, without input and with its output in ``stdout``; else it shares our
                input and output.
            is_server: make a server of its own, for processes that are to be its children.

        Raises:
            RuntimeError: the server has ended.
        """
        assert self.runs(command), command
        request = {
            "arguments": list(command[3:]),
            "env": dict(env),
            "folder": folder or os.getcwd(),
            "namespaces": [*namespaces],
            "cores": [*cores],
            "is_session": is_session,
            "is_server": is_server,
        }
        if not is_session:
            return ForkedProcess(self._ask(request, (0, 1, 2)), None)
        ours, theirs = os.pipe()
        empty = os.open(os.devnull, os.O_RDONLY)
        try:
            pid = self._ask(request, (empty, theirs, theirs))
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(empty)
            os.close(theirs)
        return ForkedProcess(pid, open(ours, "rb", buffering=0))

    def _ask(self, request: Mapping[str, Any], streams: Sequence[int]) -> int:
        """Sends a request with the descriptors of standard input, output and error; returns the process's number."""
        content = os.memfd_create("request")
        try:
            os.pwrite(content, json.dumps(request).encode(), 0)
            # The server's child becomes ours once its parent has ended.
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            socket.send_fds(self._socket, [b"request"], [content, *streams])
            answer = self._socket.recv(32)
        except BaseException as error:
            self._socket.close()  # else a late answer would count for the next request
            if isinstance(error, OSError):
                raise RuntimeError(f"no process could be forked from the server: {error}") from error
            raise
        finally:
            _prctl(_PR_SET_CHILD_SUBREAPER, 0)
            os.close(content)
        if not answer:
            raise RuntimeError("the server that forks processes has ended")
        return int(answer)


def preload(module: str) -> None:
    """Makes a `ForkServer` for this process on Linux."""
    global _preloaded
    if sys.platform == "linux":
        _preloaded = ForkServer(module)


def is_preloaded() -> bool:
    """Returns whether this process has a server."""
    return _preloaded is not None


def server_for(command: Sequence[str]) -> ForkServer | None:
    """Returns the server of this process that can start a command; None without."""
    return _preloaded if _preloaded is not None and _preloaded.runs(command) else None


def _serve(requests: socket.socket, module: str) -> NoReturn:
    """Forks a process for each request, until the other side has ended."""
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the programs in our group
    gc.freeze()  # collecting what was imported would copy its pages into every process
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 16, 4)
        if not message:
            os._exit(0)
        answer, number = os.pipe()
        child = os.fork()
        if child == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.001)
            signal.signal(signal.SIGINT, on_interrupt)
            requests.close()
            os.close(answer)
            _become(descriptors, number, module)
        os.close(number)
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(child, 0)
        started = os.read(answer, 32)
        os.close(answer)
        try:
            requests.send(started)
        except BrokenPipeError:  # the requesting process has ended, so nobody else would end the new one
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(started), signal.SIGKILL)
            os._exit(0)


def _become(descriptors: Sequence[int], number: int, module: str) -> NoReturn:
    """Applies a request to this process, and runs the module to the end of the process."""
    global _preloaded
    _preloaded = None  # of the process that we are a fork of
    request, *streams = descriptors
    content = json.loads(os.pread(request, os.fstat(request).st_size, 0))
    if content["is_session"]:
        os.setsid()
    os.write(number, str(os.getpid()).encode())
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
    for descriptor in (*descriptors, number):
        os.close(descriptor)
    folder = os.open(content["folder"], os.O_PATH | os.O_DIRECTORY)  # seen from outside of the namespaces
    if content["namespaces"]:
        _enter(content["namespaces"], content["cores"])
    os.fchdir(folder)
    os.close(folder)
    threads_before = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(content["env"])
    if content["is_server"]:
        preload(module)
    _renew(threads_before)
    sys.argv = [module, *content["arguments"]]
    sys.modules.pop(module, None)
    run_to_exit(module)


def _renew(threads_before: str | None) -> None:
    """Repeats what imports have derived from the environment, and seeds what must differ between processes."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path.cwd())
    if os.environ.get("PYTHONUNBUFFERED"):
        raw = open(1, "wb", buffering=0, closefd=False)  # noqa: SIM115
        sys.stdout = io.TextIOWrapper(raw, sys.stdout.encoding, sys.stdout.errors, write_through=True)
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    renew_rank()
    if (torch := sys.modules.get("torch")) is not None:
        threads = os.environ.get("OMP_NUM_THREADS")
        if threads is not None and threads != threads_before:
            torch.set_num_threads(int(threads))
        if torch.initial_seed() != _SEED_OF_EVERY_PROCESS:
            torch.default_generator.seed()


def _enter(namespaces: Sequence[str], cores: Sequence[int]) -> None:
    """Enters namespaces and continues in a child, as only children enter those of processes; this one waits for it."""
    files = [os.open(path, os.O_RDONLY) for path in namespaces]
    libc = ctypes.CDLL(None, use_errno=True)
    for path, file in zip(namespaces, files, strict=True):
        if libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter {path}: {os.strerror(ctypes.get_errno())}")
    for file in files:
        os.close(file)
    child = os.fork()
    if child:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status < 0:
            signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
            os.kill(os.getpid(), -status)
        os._exit(status)
    if cores:
        os.sched_setaffinity(0, cores)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
