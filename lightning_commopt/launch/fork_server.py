"""ForkServer: starts processes that find everything imported, and otherwise all as ``python -m`` would have it.

Importing torch and Lightning takes longer than a short training. A server is a copy of a process that has imported them
and has done nothing else; what it starts is a copy of the server, which runs a module from its beginning.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from lightning_commopt.compat.lightning import renew_rank
from lightning_commopt.launch.forked_process import ForkedProcess, run_to_exit

_PR_SET_CHILD_SUBREAPER = 36
_SEED_OF_EVERY_PROCESS = 67280421310721  # of older torch; newer ones draw one
_preloaded: ForkServer | None = None


@dataclass(frozen=True, kw_only=True)
class NamespacePlace:
    """Where a process runs, other than beside the one that starts it.

    Attributes:
        namespaces: files of Linux namespaces to enter, in this order.
        folder: to start in, as a path of the process that starts it.
        cores: to run on; empty for all.
    """

    namespaces: tuple[str, ...]
    folder: str
    cores: tuple[int, ...] = ()


class ForkServer:
    """A copy of this process as it is now, that forks further ones. It ends with the process that made it.

    To be made early: before threads of our own are started, CUDA is touched or anything of a run is set.

    Args:
        module: what the processes run, as ``python -m`` does.
    """

    def __init__(self, module: str) -> None:
        self.module = module
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else what they hold is written twice
        self._socket, requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self._socket.close()
            _serve(requests, module)
        requests.close()

    def runs(self, command: Sequence[str]) -> bool:
        """Returns whether a command is one that this server can start."""
        return list(command[:3]) == [sys.executable, "-m", self.module]

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        folder: str | None = None,
        place: NamespacePlace | None = None,
        is_session: bool = False,
        is_server: bool = False,
    ) -> ForkedProcess:
        """Starts a process, as ``subprocess.Popen`` does.

        Args:
            command: that the server `runs`.
            env: the whole environment.
            folder: to start in; None for ours, or that of ``place``.
            place: where it runs; None for beside us.
            is_session: whether it leads a session of its own, without input and with its output in ``stdout``; else it
                has our input and output.
            is_server: whether it has a server of its own, for processes that are to be its children.

        Raises:
            RuntimeError: the server is gone.
        """
        assert self.runs(command), command
        request = {
            "arguments": list(command[3:]),
            "env": dict(env),
            "folder": folder or os.getcwd(),
            "place": None if place is None else asdict(place),
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
        """Sends a request, with what becomes standard input, output and error; returns the number of the process."""
        content = os.memfd_create("request")
        try:
            os.pwrite(content, json.dumps(request).encode(), 0)
            # The server's child is nobody's once its parent has ended: the kernel gives it to us.
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            socket.send_fds(self._socket, [b"request"], [content, *streams])
            answer = self._socket.recv(32)
        except BaseException as error:
            self._socket.close()  # else an answer that comes later would be taken for that of the next request
            if isinstance(error, OSError):
                raise RuntimeError(f"no process could be forked from the server: {error}") from error
            raise
        finally:
            _prctl(_PR_SET_CHILD_SUBREAPER, 0)
            os.close(content)
        if not answer:
            raise RuntimeError("the server that processes are forked from is gone")
        return int(answer)


def preload(module: str) -> None:
    """Makes a server for this process, where the system has what it needs; see `ForkServer`."""
    global _preloaded
    if sys.platform == "linux":
        _preloaded = ForkServer(module)


def is_preloaded() -> bool:
    """Returns whether this process has a server."""
    return _preloaded is not None


def server_for(command: Sequence[str]) -> ForkServer | None:
    """Returns the server of this process that can start a command; None without."""
    return _preloaded if _preloaded is not None and _preloaded.runs(command) else None


def start_in_place(
    command: Sequence[str], env: Mapping[str, str], namespaces: Sequence[str], folder: str, cores: Sequence[int]
) -> ForkedProcess:
    """Starts a command from the server of this process in a `NamespacePlace`; its output comes from ``stdout``."""
    server = server_for(command)
    assert server is not None, command
    place = NamespacePlace(namespaces=tuple(namespaces), folder=folder, cores=tuple(cores))
    return server.start(command, env=env, place=place, is_session=True)


def _serve(requests: socket.socket, module: str) -> NoReturn:
    """Forks a process for each request, until the other side is gone."""
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
        except BrokenPipeError:  # who asked was ended meanwhile, and nobody else would end what it has asked for
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(started), signal.SIGKILL)
            os._exit(0)


def _become(descriptors: Sequence[int], number: int, module: str) -> NoReturn:
    """Makes this process what a request asks for, and runs the module to the end of the process."""
    global _preloaded
    _preloaded = None  # that of the process which we are a copy of
    request, *streams = descriptors
    content = json.loads(os.pread(request, os.fstat(request).st_size, 0))
    if content["is_session"]:
        os.setsid()
    os.write(number, str(os.getpid()).encode())
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
    for descriptor in (*descriptors, number):
        os.close(descriptor)
    if content["place"] is None:
        os.chdir(content["folder"])
    else:
        _enter(NamespacePlace(**content["place"]))
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
    """Does again what importing has done by the environment, and what must differ between processes."""
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


def _enter(place: NamespacePlace) -> None:
    """Enters namespaces; new processes of them are children, so this one waits for a child that goes on instead."""
    files = [os.open(path, os.O_RDONLY) for path in place.namespaces]
    folder = os.open(place.folder, os.O_RDONLY | os.O_DIRECTORY)
    libc = ctypes.CDLL(None, use_errno=True)
    for path, file in zip(place.namespaces, files, strict=True):
        if libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter {path}: {os.strerror(ctypes.get_errno())}")
    os.fchdir(folder)
    for file in (*files, folder):
        os.close(file)
    child = os.fork()
    if child:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status < 0:
            signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
            os.kill(os.getpid(), -status)
        os._exit(status)
    if place.cores:
        os.sched_setaffinity(0, place.cores)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
