"""How the library of the kernels in C is compiled, and what happens where it cannot be."""

import logging
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_commopt.compressors import PowerSGD
from lightning_commopt.compressors.kernels import blockwise, c_library
from lightning_commopt.compressors.kernels.blockwise_format import BlockFormat
from lightning_commopt.compressors.sharded import ShardedInt8
from lightning_commopt.measure import private_folder
from lightning_commopt.sync.ddp.attach import attach_bucket_hook
from lightning_commopt.sync.fsdp2.gradients import ShardedSync
from lightning_commopt.sync.fsdp2.parameters import GatheredParameters
from support.c_kernels import must_run_in_c
from support.collectives import takes_collectives
from support.ranks import run_ranks

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
_BLOCKWISE = next(path for path in c_library._SOURCES if path.stem == "blockwise")


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every test compiles its own library, of one function and without the optimizations that take most of the time."""
    (tmp_path / "kernel.c").write_text("int kernel(void) { return 0; }\n")
    monkeypatch.setattr(c_library, "_SOURCES", [tmp_path / "kernel.c"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(c_library, "load", c_library.load.__wrapped__)
    monkeypatch.setattr(c_library, "_FLAGS", tuple(flag for flag in c_library._FLAGS if flag != "-O3"))


def _ddp(model: nn.Module) -> tuple[nn.Module, Callable[[], object]]:
    wrapped = DistributedDataParallel(model)
    return wrapped, attach_bucket_hook(wrapped, PowerSGD(), None).close


def _fsdp2(sync: ShardedSync | GatheredParameters, model: nn.Module) -> tuple[nn.Module, Callable[[], object]]:
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    sync.attach(model)
    return model, sync.detach


_ATTACHED: dict[str, Callable[[nn.Module], tuple[nn.Module, Callable[[], object]]]] = {
    "ddp": _ddp,
    "fsdp2_gradients": lambda model: _fsdp2(ShardedSync(ShardedInt8()), model),
    "fsdp2_parameters": lambda model: _fsdp2(GatheredParameters(), model),
}


def _attach_then_backward(folder: Path, attached: str) -> tuple[list[str], str]:
    os.environ.update(XDG_CACHE_HOME=str(folder), CC=str(folder / "compiler"))
    c_library.load.cache_clear()
    dist.barrier()
    model, detach = _ATTACHED[attached](nn.Linear(64, 64))
    (library,) = (folder / "lightning_commopt").glob("*.so")
    with mock.patch.object(subprocess, "run", side_effect=AssertionError("compiles in a step")):
        model(torch.ones(1, 64) * (dist.get_rank() + 1)).sum().backward()
    detach()
    loaded = c_library.load()
    assert loaded is not None
    assert loaded._name == str(library)
    return (folder / "log").read_text().split(), str(library)


@needs_compiler
@pytest.mark.parametrize(
    "attached",
    ["ddp", *(pytest.param(x, marks=[takes_collectives, pytest.mark.exhaustive]) for x in list(_ATTACHED)[1:])],
)
def test_ranks_compile_once_and_before_a_step(attached: str, tmp_path: Path) -> None:
    """If it fails, the first forward or backward waits for a compiler, or all ranks of a machine compile."""
    count = f'for x; do [ "$x" = -shared ] && echo once >> {tmp_path}/log && sleep 0.5; done'
    (tmp_path / "compiler").write_text(f'#!/bin/sh\n{count}\nexec cc "$@" -O0\n')
    (tmp_path / "compiler").chmod(0o755)
    outcomes = run_ranks(_attach_then_backward, tmp_path, attached)
    (library,) = (tmp_path / "lightning_commopt").glob("*.so")
    assert outcomes == [(["once"], str(library))] * 2
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700


@needs_compiler
def test_compiling_is_announced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a first run stops for seconds and does not say why, or every run says so."""
    announced: list[str] = []
    monkeypatch.setattr(c_library, "info", announced.append)
    assert c_library.load() is not None
    assert c_library.load() is not None
    (line,) = announced
    assert line.startswith("Compiling the CPU kernels with cc")


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
def test_a_compiler_that_assumes_there_is_no_nan_has_to_heed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, one overflow stays in the residual for good."""
    monkeypatch.setattr(c_library, "load", cache(c_library.load))
    monkeypatch.setattr(c_library, "_SOURCES", [_BLOCKWISE])
    monkeypatch.setenv("CC", "cc -ffast-math")
    block_format, flat, residual = BlockFormat(8, 16), torch.ones(32), torch.zeros(32)
    flat[5] = torch.nan
    message = torch.empty(1, block_format.shard_bytes(32, 1), dtype=torch.uint8)
    with must_run_in_c("encode"):
        blockwise.encode(flat, residual, message, block_format)
    assert residual.isfinite().all()


@needs_compiler
def test_other_flags_and_sources_are_other_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If it fails, a new version of the package runs the kernels of an earlier one."""
    assert c_library.load() is not None
    monkeypatch.setattr(c_library, "_FLAGS", (*c_library._FLAGS, "-g0"))
    assert c_library.load() is not None
    (tmp_path / "kernel.c").write_text("int kernel(void) { return 1; }\n")
    assert c_library.load() is not None
    assert len([*(tmp_path / "lightning_commopt").glob("*.so")]) == 3


def _plant(file: Path, mark: Path) -> None:
    """Replaces a library by one that writes a file when it is loaded."""
    source = file.with_suffix(".c")
    source.write_text(
        f'#include <stdio.h>\n__attribute__((constructor)) static void run() {{ fopen("{mark}", "w"); }}\n'
    )
    file.unlink()
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(file)], check=True)


def _move_and_link(file: Path) -> None:
    file.symlink_to(file.rename(file.with_name("other.so")))


def _link_lock(file: Path) -> None:
    file.unlink()
    _move_and_link(file.with_suffix(".lock"))


_UNSAFE: dict[str, tuple[Callable[[Path], object], str]] = {
    "folder that everybody can write": (lambda file: file.parent.chmod(0o777), "everybody can write"),
    "folder that a group can write": (lambda file: _share_with_group(file.parent), "can write to"),
    "file that everybody can write": (lambda file: file.chmod(0o666), "everybody can write"),
    "file that a group can write": (lambda file: _share_with_group(file), "can write to"),
    "symbolic link": (_move_and_link, "is a symbolic link"),
    "symbolic link as the lock": (_link_lock, "is a symbolic link"),
    "folder of another user": (lambda file: os.chown(file.parent, 65534, 65534), "belongs to user 65534"),
    "file of another user": (lambda file: os.chown(file, 65534, 65534), "belongs to user 65534"),
}


def _share_with_group(path: Path) -> None:
    if os.geteuid() == 0:
        os.chown(path, 0, 65534)
    path.chmod(0o770)


@needs_compiler
@pytest.mark.parametrize("place", _UNSAFE)
def test_what_others_may_have_planted_is_not_loaded(
    place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If it fails, whoever can write to the cache runs code as this user."""
    if "another user" in place and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    assert c_library.load() is not None
    (library,) = (tmp_path / "lightning_commopt").glob("kernels-*.so")
    _plant(library, tmp_path / "planted")
    make_unsafe, reason = _UNSAFE[place]
    make_unsafe(library)
    warned: list[str] = []
    monkeypatch.setattr(c_library, "warn_once", warned.append)
    if os.geteuid() != 0:
        monkeypatch.setattr(private_folder, "_is_private_group", lambda gid: False)
    loaded = c_library.load()
    assert loaded is not None
    assert loaded._name != str(library)
    assert not (tmp_path / "planted").exists()
    assert reason in warned[0]


@needs_compiler
def test_nothing_is_left_where_there_is_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If it fails, every process without a cache leaves a folder in TMPDIR."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    assert c_library.load() is not None
    assert [*(tmp_path / "tmp").iterdir()] == []


@needs_compiler
def test_a_cache_of_this_user_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If it fails, ordinary machines compile in each process: caches on other disks, umask 002, shared parents."""
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "lightning_commopt").symlink_to(tmp_path / "disk")
    tmp_path.chmod(0o777)
    assert c_library.load() is not None
    (library,) = (tmp_path / "disk").glob("kernels-*.so")
    library.chmod(0o775)
    (tmp_path / "disk").chmod(0o775)
    monkeypatch.setattr(private_folder, "_is_private_group", lambda gid: gid == library.stat().st_gid)
    monkeypatch.setattr(c_library, "_compile", None)
    loaded = c_library.load()
    assert loaded is not None
    assert loaded._name == str(tmp_path / "lightning_commopt" / library.name)
