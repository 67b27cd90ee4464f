"""The library of the C kernels, compiled once on each machine with the machine's own compiler, and kept.

Without a compiler the plain torch forms run, which are slower. ``CC`` names another compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lightning_commopt.measure.private_folder import PrivateFolder, UntrustedError, cache_folder
from lightning_commopt.text.validation import info, warn_once

_SOURCES = sorted(Path(__file__).parent.glob("*.c"))
_FLAGS = (
    "-fno-fast-math",  # Intel's compiler and some CC assume that there is no NaN; then one would stay in a residual
    "-O3",
    "-march=native",
    "-mprefer-vector-width=512",
    "-fno-math-errno",
    "-shared",
    "-fPIC",
)
_THREADS = "-fopenmp"  # left out if the compiler does not know it
_TIMEOUT_S = 180  # limit of a compilation, which takes about 2 s; ranks on a busy machine share few cores

_logger = logging.getLogger(__name__)


@cache
def load() -> ctypes.CDLL | None:
    """Returns the library, and compiles it first if this machine has none yet; other processes wait meanwhile.

    It is called when gradient sync is set up, so that no backward waits for a compiler.

    Returns:
        The library; None if it cannot be made, for a reason that is logged at level INFO.
    """
    try:
        compiler = shlex.split(os.environ.get("CC", "cc"))
        if not compiler or shutil.which(compiler[0]) is None:
            _logger.info("There is no C compiler: compressors use plain torch on CPU.")
            return None
        return _load(compiler)
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        _logger.info("The C kernels cannot be used, so compressors use plain torch on CPU: %s", _describe(error))
        return None


def call(name: str, *arguments: int | Tensor | None) -> int:
    """Calls a kernel, whose first argument is the number of threads that torch uses.

    Args:
        name: name of the C function, whose integers are all ``ptrdiff_t``.
        arguments: the other arguments: numbers, tensors for pointers to their first element, None for NULL.
    """
    status: int = getattr(load(), name)(ctypes.c_ssize_t(torch.get_num_threads()), *map(_as_c, arguments))
    return status


def _as_c(argument: int | Tensor | None) -> ctypes.c_ssize_t | ctypes.c_void_p | None:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return None if argument is None else ctypes.c_ssize_t(argument)


def _load(compiler: list[str]) -> ctypes.CDLL:
    """Loads the kept library for this source, compiler, flags and processor, or compiles it if there is none yet."""
    # The macros that a compiler predefines include its version and the features of the processor.
    predefined = _run([*compiler, "-march=native", "-dM", "-E", "-"])
    contents = [*(source.read_bytes() for source in _SOURCES), predefined, repr((compiler, _FLAGS)).encode()]
    digest = hashlib.sha256(b"\0".join(contents)).hexdigest()
    name = f"kernels-{digest[:16]}.so"
    try:
        with PrivateFolder(cache_folder()) as folder:
            library = _open(folder, name)
            if library is None:
                info(f"Compiling the CPU kernels with {compiler[0]}, once for this machine (about 2 s).")
                with folder.lock(f"kernels-{digest[:16]}.lock", 2 * _TIMEOUT_S):
                    library = _open(folder, name) or _compile(compiler, name, keep_in=folder)
            return library
    except UntrustedError as error:
        warn_once(
            f"The C kernels are compiled again in each process, because what is in the cache is not safe: {error}"
        )
    except (OSError, RuntimeError) as error:  # there is no home, or it is read-only or mounted with noexec
        _logger.info("The C kernels are compiled again in each process, because the cache cannot be used: %s", error)
    return _compile(compiler, name, keep_in=None)


def _open(folder: PrivateFolder, name: str) -> ctypes.CDLL | None:
    """Loads a kept library; returns None if there is none."""
    fd = folder.open(name)
    if fd is None:
        return None
    opened = f"/proc/self/fd/{fd}"  # the file that was checked, even if the name has another file by now
    if not os.path.exists(opened):  # this system is not Linux
        return ctypes.CDLL(str(folder.path / name))
    # The descriptor stays open: the linker takes a second library with an equal name for the first one.
    return ctypes.CDLL(str(folder.path / name), handle=ctypes.CDLL(opened)._handle)


def _compile(compiler: list[str], name: str, keep_in: PrivateFolder | None) -> ctypes.CDLL:
    """Compiles the library in a temporary folder, which is removed once it is loaded or kept."""
    with tempfile.TemporaryDirectory(prefix="commopt-kernels-") as temporary:
        file = Path(temporary) / name
        command = [*compiler, *_FLAGS, *map(str, _SOURCES), "-o", str(file)]
        try:
            _run([*command, _THREADS])
        except subprocess.CalledProcessError:
            _run(command)
        if keep_in is not None:
            keep_in.write(name, file.read_bytes())
            library = _open(keep_in, name)
            assert library is not None
            return library
        return ctypes.CDLL(str(file))


def _run(command: list[str]) -> bytes:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=_TIMEOUT_S)
    return done.stdout


def _describe(error: Exception) -> str:
    printed = getattr(error, "stderr", None)
    return printed.decode(errors="replace").strip() if printed else str(error)
