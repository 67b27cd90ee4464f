"""Builds the libraries of the fake device: once for a machine, kept under a hash of their sources and of torch."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from lightning_commopt.measure.private_folder import PrivateFolder, cache_folder

_SOURCES = Path(__file__).parent / "native"
_COMPILER = "g++"
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-pthread")
_LIMIT_S = 300  # on a machine that is busy
_CUDA, _TORCH = "13.", "2.15"  # whose interfaces the sources have
_KEPT = (12, 30 * 86400)  # files in the cache, and seconds
_HEADERS = ("crt/host_defines.h", "nccl.h", "nv/target")


class Unavailable(Exception):  # noqa: N818 - a reason to skip, not an error
    """The fake device cannot be built here; the message has the reason."""


class Libraries(NamedTuple):
    """Files, in the order in which they are loaded; the last one behind torch."""

    driver: Path
    runtime: Path
    operators: Path


class _Library(NamedTuple):
    name: str  # by which others look for it once it is loaded
    sources: tuple[str, ...]
    options: tuple[str, ...] = ()


def libraries() -> Libraries:
    """Returns the libraries, built if this machine has none for these sources; raises `Unavailable`."""
    reason = _why_not()
    if reason is not None:
        raise Unavailable(reason)
    includes = [f"-I{folder}" for folder in _header_folders()]
    digest = _digest(includes)
    try:
        with PrivateFolder(cache_folder() / "fake_device") as folder, folder.lock(f"{digest}.lock", _LIMIT_S):
            built = Libraries(*(folder.path / f"{digest}-{library.name}" for library in _libraries()))
            if not all(file.exists() for file in built):
                folder.drop_oldest(*_KEPT)
                _build(folder, digest, includes)
            return built
    except (OSError, RuntimeError) as error:
        raise Unavailable(f"there is no cache to build the fake device in: {error}") from error


def _why_not() -> str | None:
    if not sys.platform.startswith("linux"):
        return "the fake device is for Linux"
    if not (torch.version.cuda or "").startswith(_CUDA):
        return f"the fake device is for torch with CUDA {_CUDA}x, not {torch.version.cuda}"
    if torch.__version__ < _TORCH:
        return f"the fake device is for torch {_TORCH} or newer"
    return None if shutil.which(_COMPILER) else f"there is no {_COMPILER} to build the fake device with"


def _libraries() -> Iterator[_Library]:
    torch_folder = Path(torch.__file__).parent
    yield _Library("libcuda.so.1", ("driver.cpp",))
    yield _Library("libfake_device.so", ("runtime.cpp", "streams.cpp", "memory.cpp", "nccl.cpp"))
    torch_includes = (f"-I{torch_folder / 'include'}", f"-I{torch_folder / 'include/torch/csrc/api/include'}")
    linked = ("-L.", "-lfake_device", f"-L{torch_folder / 'lib'}", "-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda")
    yield _Library("libfake_operators.so", ("operators.cpp", "allocator.cpp"), (*torch_includes, *linked))


def _header_folders() -> list[Path]:
    """Returns the folders with CUDA's and NCCL's headers, from the packages that torch depends on."""
    candidates = [folder / "backends/nvidia/include" for folder in _folders_of("triton")]
    for folder in _folders_of("nvidia"):
        candidates += [*sorted(folder.glob("*/include")), *sorted(folder.glob("*/include/cccl"))]
    found = {name: next((each for each in candidates if (each / name).exists()), None) for name in _HEADERS}
    if missing := [name for name, folder in found.items() if folder is None]:
        raise Unavailable(f"the headers of the fake device are not installed: {', '.join(missing)}")
    return [folder for folder in found.values() if folder is not None]


def _folders_of(package: str) -> Iterable[Path]:
    spec = importlib.util.find_spec(package)
    return map(Path, (spec and spec.submodule_search_locations) or ())


def _digest(includes: list[str]) -> str:
    version = subprocess.run([_COMPILER, "--version"], capture_output=True, check=True).stdout
    sources = [source.read_bytes() for source in sorted(_SOURCES.iterdir())]
    settings = repr((torch.__version__, torch.__file__, _FLAGS, includes, list(_libraries()))).encode()
    return hashlib.sha256(b"\0".join([version, settings, *sources])).hexdigest()[:16]


def _build(folder: PrivateFolder, digest: str, includes: list[str]) -> None:
    """Compiles the libraries in a temporary folder, and keeps them."""
    with tempfile.TemporaryDirectory() as temporary:
        for library in _libraries():
            sources = [str(_SOURCES / source) for source in library.sources]
            command = [_COMPILER, *_FLAGS, *includes, *sources, f"-Wl,-soname,{library.name}", "-o", library.name]
            subprocess.run([*command, *library.options], cwd=temporary, check=True, timeout=_LIMIT_S)
            folder.write(f"{digest}-{library.name}", (Path(temporary) / library.name).read_bytes())
