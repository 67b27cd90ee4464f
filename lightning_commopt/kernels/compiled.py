"""The kernels in C: made with the machine's compiler when they are first needed, and kept for the next time.

Without a compiler the plain torch forms run, which do the same, slower. ``CC`` names another compiler.
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

_SOURCES = sorted(Path(__file__).parent.glob("*.c"))
_FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")
_THREADS = "-fopenmp"  # which not every compiler has
_TIMEOUT_S = 60

_logger = logging.getLogger(__name__)


@cache
def loaded() -> ctypes.CDLL | None:
    """Returns the kernels, or None where they cannot be made; why is logged at level INFO."""
    try:
        compiler = shlex.split(os.environ.get("CC", "cc"))
        if not compiler or shutil.which(compiler[0]) is None:
            _logger.info("There is no C compiler: compressors use plain torch on CPU.")
            return None
        return ctypes.CDLL(str(_made(compiler)))
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        _logger.info("The kernels in C cannot be used, plain torch does their work: %s", _described(error))
        return None


def call(name: str, *arguments: int | Tensor | None) -> int:
    """Calls a kernel, with the number of threads that torch uses before its other arguments.

    Args:
        name: of the C function; all its numbers are ``ptrdiff_t``.
        arguments: numbers, tensors for pointers to their first element, None for NULL.
    """
    return getattr(loaded(), name)(ctypes.c_ssize_t(torch.get_num_threads()), *map(_as_c, arguments))


def _as_c(argument: int | Tensor | None) -> ctypes.c_ssize_t | ctypes.c_void_p | None:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return None if argument is None else ctypes.c_ssize_t(argument)


def _made(compiler: list[str]) -> Path:
    """Returns the library's file; it is made if there is none yet of this source, compiler and processor."""
    # Among what a compiler predefines are its version and what the processor has.
    predefined = _run([*compiler, "-march=native", "-dM", "-E", "-"])
    contents = [*(source.read_bytes() for source in _SOURCES), predefined, repr(compiler).encode()]
    digest = hashlib.sha256(b"\0".join(contents)).hexdigest()
    file = _folder() / f"kernels-{digest[:16]}.so"
    if not file.exists():
        descriptor, name = tempfile.mkstemp(dir=file.parent, suffix=".so")
        os.close(descriptor)
        command = [*compiler, *_FLAGS, *map(str, _SOURCES), "-o", name]
        try:
            try:
                _run([*command, _THREADS])
            except subprocess.CalledProcessError:
                _run(command)
            os.replace(name, file)  # at once: other ranks may be making it as well
        finally:
            Path(name).unlink(missing_ok=True)
    return file


def _folder() -> Path:
    """Returns a folder of this user's own for what is made."""
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


def _described(error: Exception) -> str:
    printed = getattr(error, "stderr", None)
    return printed.decode(errors="replace").strip() if printed else str(error)
