"""The library of the kernels in C: compiled once for each machine, with its own compiler, and kept.

Without a compiler the plain torch forms run, which do the same, slower. ``CC`` names another compiler.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lightning_commopt.text.validation import info

_SOURCES = sorted(Path(__file__).parent.glob("*.c"))
_FLAGS = ("-O3", "-march=native", "-mprefer-vector-width=512", "-fno-math-errno", "-shared", "-fPIC")
_THREADS = "-fopenmp"  # which not every compiler has
_TIMEOUT_S = 180  # on a machine that is busy
_POLL_S = 0.05

_logger = logging.getLogger(__name__)


@cache
def load() -> ctypes.CDLL | None:
    """Returns the library, compiled if this machine has none yet; other processes that call this wait for it.

    Called when gradient sync is set up, so that no backward waits for a compiler.

    Returns:
        None where it cannot be made; why is logged at level INFO.
    """
    try:
        compiler = shlex.split(os.environ.get("CC", "cc"))
        if not compiler or shutil.which(compiler[0]) is None:
            _logger.info("There is no C compiler: compressors use plain torch on CPU.")
            return None
        return ctypes.CDLL(str(_compile(compiler)))
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        _logger.info("The C kernels cannot be used, so compressors use plain torch on CPU: %s", _describe(error))
        return None


def call(name: str, *arguments: int | Tensor | None) -> int:
    """Calls a kernel, with the number of threads that torch uses before its other arguments.

    Args:
        name: of the C function; all its numbers are ``ptrdiff_t``.
        arguments: numbers, tensors for pointers to their first element, None for NULL.
    """
    return getattr(load(), name)(ctypes.c_ssize_t(torch.get_num_threads()), *map(_as_c, arguments))


def _as_c(argument: int | Tensor | None) -> ctypes.c_ssize_t | ctypes.c_void_p | None:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return None if argument is None else ctypes.c_ssize_t(argument)


def _compile(compiler: list[str]) -> Path:
    """Returns the library's file; compiles it if there is none yet of this source, compiler and processor."""
    # Among what a compiler predefines are its version and what the processor has.
    predefined = _run([*compiler, "-march=native", "-dM", "-E", "-"])
    contents = [*(source.read_bytes() for source in _SOURCES), predefined, repr(compiler).encode()]
    digest = hashlib.sha256(b"\0".join(contents)).hexdigest()
    file = _folder() / f"kernels-{digest[:16]}.so"
    if file.exists():
        return file
    info(f"Compiling the CPU kernels with {compiler[0]}, once for this machine (about 2 s).")
    with _lock(file.with_suffix(".lock")), tempfile.TemporaryDirectory(dir=file.parent) as folder:
        if not file.exists():
            made = Path(folder) / file.name
            command = [*compiler, *_FLAGS, *map(str, _SOURCES), "-o", str(made)]
            try:
                _run([*command, _THREADS])
            except subprocess.CalledProcessError:
                _run(command)
            os.replace(made, file)  # at once: nobody loads half a library
    return file


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Lets one process of this machine in at a time; without a lock where files have none, or one is held too long."""
    last_s = time.monotonic() + 2 * _TIMEOUT_S
    with path.open("w") as file:
        while time.monotonic() < last_s:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_POLL_S)
            except OSError:
                break
        yield


def _folder() -> Path:
    """Returns a folder of this user's own for the library."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_commopt"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # no home, or one that cannot be written
        return Path(tempfile.mkdtemp())


def _run(command: list[str]) -> bytes:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=_TIMEOUT_S)
    return done.stdout


def _describe(error: Exception) -> str:
    printed = getattr(error, "stderr", None)
    return printed.decode(errors="replace").strip() if printed else str(error)
