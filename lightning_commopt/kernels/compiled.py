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

_SOURCE = Path(__file__).with_name("low_rank.c")
_FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")
_THREADS = "-fopenmp"  # which not every compiler has
_TIMEOUT_S = 60

_logger = logging.getLogger(__name__)


@cache
def library() -> ctypes.CDLL | None:
    """Returns the kernels, or None where they cannot be made; why is logged at level INFO."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if not compiler or shutil.which(compiler[0]) is None:
        _logger.info("There is no C compiler: low-rank compressors use plain torch on CPU.")
        return None
    try:
        return ctypes.CDLL(str(_made(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        _logger.info("The kernels in C cannot be used, plain torch does their work: %s", _described(error))
        return None


def _made(compiler: list[str]) -> Path:
    """Returns the library's file; it is made if there is none yet of this source, compiler and processor."""
    # Among what a compiler predefines are its version and what the processor has.
    predefined = _run([*compiler, "-march=native", "-dM", "-E", "-"])
    digest = hashlib.sha256(b"\0".join([_SOURCE.read_bytes(), predefined, repr(compiler).encode()])).hexdigest()
    file = _folder() / f"{_SOURCE.stem}-{digest[:16]}.so"
    if not file.exists():
        descriptor, name = tempfile.mkstemp(dir=file.parent, suffix=".so")
        os.close(descriptor)
        command = [*compiler, *_FLAGS, str(_SOURCE), "-o", name]
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
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_commopt"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp())


def _run(command: list[str]) -> bytes:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=_TIMEOUT_S)
    return done.stdout


def _described(error: Exception) -> str:
    printed = getattr(error, "stderr", None)
    return printed.decode(errors="replace").strip() if printed else str(error)
