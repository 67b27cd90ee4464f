"""How the kernels in C are made, and what happens where they cannot be."""

import logging
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_commopt.kernels import chunks, compiled
from lightning_commopt.kernels.chunks import use_compiled

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture(autouse=True)
def not_made_yet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every test makes its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compiled, "loaded", compiled.loaded.__wrapped__)


@needs_compiler
def test_it_is_made_once(tmp_path: Path) -> None:
    """If it fails, every process waits for a compiler, or finds half of a library that another one is writing."""
    command = [sys.executable, "-c", "import runpy; print(runpy.run_path('compiled.py')['loaded']()._name)"]
    make = partial(subprocess.check_output, text=True, cwd=Path(compiled.__file__).parent)
    with ThreadPoolExecutor() as pool:
        printed = list(pool.map(make, [command] * 3))
    (file,) = (tmp_path / "lightning_commopt").iterdir()
    assert printed == [f"{file}\n"] * 3
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    before = file.stat()
    assert compiled.loaded() is not None
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("command", ["there-is-no-such-compiler", "false", "", "sh -c 'exit 3'", "'"])
def test_without_a_compiler_there_is_none(
    command: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If it fails, training ends where there is no compiler, or nobody learns why it is slower."""
    monkeypatch.setenv("CC", command)
    with caplog.at_level(logging.INFO):
        assert compiled.loaded() is None
    assert "plain torch" in caplog.text


@needs_compiler
def test_a_compiler_without_openmp_is_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If it fails, macOS has no kernels in C."""
    script = tmp_path / "compiler"
    script.write_text('#!/bin/sh\nfor x; do [ "$x" = -fopenmp ] && exit 1; done\nexec cc "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    assert compiled.loaded() is not None


@needs_compiler
def test_a_home_that_is_read_only_is_no_hindrance(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If it fails, training ends in containers whose home cannot be written."""
    occupied = tmp_path / "file"
    occupied.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(occupied))
    assert compiled.loaded() is not None


def test_only_float32_on_cpu_is_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, other dtypes are read as if they were float32."""
    monkeypatch.setattr(chunks, "loaded", object)
    assert use_compiled(torch.zeros(1))
    assert not use_compiled(torch.zeros(1, dtype=torch.float64))
    assert not use_compiled(torch.zeros(1, dtype=torch.bfloat16))
    assert not use_compiled(torch.zeros(1, device="meta"))
