"""How the library of the kernels in C is compiled, and what happens where it cannot be."""

import logging
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compressors import PowerSGD
from lightning_commopt.ddp.hook import attach_bucket_hook
from lightning_commopt.kernels import c_library
from ranks import run_ranks

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every test compiles its own library."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(c_library, "load", c_library.load.__wrapped__)


def counting_compiler(folder: Path) -> tuple[Path, Path]:
    """Returns a compiler that takes half a second longer, and the file in which it counts its libraries."""
    script, log = folder / "compiler", folder / "log"
    script.write_text(
        f'#!/bin/sh\nfor x; do [ "$x" = -shared ] && echo once >> {log} && sleep 0.5; done\nexec cc "$@"\n'
    )
    script.chmod(0o755)
    return script, log


@needs_compiler
def test_processes_that_start_at_once_compile_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If it fails, all ranks of a machine compile, or one loads half of a library that another one is writing."""
    compiler, log = counting_compiler(tmp_path)
    monkeypatch.setenv("CC", str(compiler))
    command = [sys.executable, "-c", "from lightning_commopt.kernels import c_library; print(c_library.load()._name)"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = [process.communicate()[0] for process in processes]
    (file,) = (tmp_path / "lightning_commopt").glob("*.so")
    assert printed == [f"{file}\n"] * 3
    assert log.read_text() == "once\n"
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


@needs_compiler
def test_compiling_is_announced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a first run stops for seconds and does not say why, or every run says so."""
    said: list[str] = []
    monkeypatch.setattr(c_library, "rank_zero_info", said.append)
    assert c_library.load() is not None
    assert c_library.load() is not None
    (line,) = said
    assert line.startswith("Compiling the CPU kernels with cc")


def _attach_then_backward(folder: str) -> tuple[list[str], bool]:
    os.environ["XDG_CACHE_HOME"] = folder
    c_library.load.cache_clear()
    model = DistributedDataParallel(nn.Linear(64, 64))
    hook = attach_bucket_hook(model, PowerSGD(), None)
    libraries = [file.name for file in Path(folder).rglob("*.so")]
    with mock.patch.object(subprocess, "run", side_effect=AssertionError("compiles in backward")):
        model(torch.ones(1, 64) * (dist.get_rank() + 1)).sum().backward()
    hook.close()
    return libraries, c_library.load() is not None


@needs_compiler
def test_backward_compiles_nothing(tmp_path: Path) -> None:
    """If it fails, the first backward waits for a compiler, and its time counts as compression."""
    for libraries, is_there in run_ranks(_attach_then_backward, str(tmp_path / "ranks")):
        assert len(libraries) == 1
        assert is_there


@pytest.mark.parametrize("command", ["there-is-no-such-compiler", "false", "", "sh -c 'exit 3'", "'"])
def test_without_a_compiler_there_is_none(
    command: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If it fails, training ends where there is no compiler, or nobody learns why it is slower."""
    monkeypatch.setenv("CC", command)
    with caplog.at_level(logging.INFO):
        assert c_library.load() is None
    assert "plain torch" in caplog.text


@needs_compiler
def test_a_compiler_without_openmp_is_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If it fails, macOS has no kernels in C."""
    script = tmp_path / "compiler"
    script.write_text('#!/bin/sh\nfor x; do [ "$x" = -fopenmp ] && exit 1; done\nexec cc "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    assert c_library.load() is not None


@needs_compiler
def test_a_home_that_is_read_only_is_no_hindrance(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If it fails, training ends in containers whose home cannot be written."""
    occupied = tmp_path / "file"
    occupied.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(occupied))
    assert c_library.load() is not None
