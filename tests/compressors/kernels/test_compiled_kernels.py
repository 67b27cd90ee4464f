"""Triton's kernels compile for devices that are not there, as training launches them; see the benchmark."""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from forms import in_form, needs_triton

pytest.importorskip("triton")
from compiled_kernels import CompiledKernel, compile_kernels, launch_reduced
from triton.runtime.jit import JITFunction

from lightning_commopt.compressors.kernels import elementwise, low_rank
from lightning_commopt.compressors.kernels.factors import Matrix, Parts, orthonormalize

# Triton 3.2 has no bfloat16 for sm_75, and no sm_100.
IS_OLD = tuple(map(int, version("triton").split(".")[:2])) < (3, 5)
DEVICES = [80] if IS_OLD else [75, 100]
# Those that give the bits of plain torch must not be fused by the compiler; the others are fused on every rank.
UNFUSED = {
    *("_find_bad", "_combine_flags", "_narrow", "_convert", "_sum_rows", "_widen", "_add_lost"),
    *("_encode", "_reduce", "_average", "_find_bad_scales", "_decode"),
}
FUSED = {
    *("_compress", "_add_up", "_subtract_product", "_decompress"),
    *("_multiply_candidates", "_combine", "_apply"),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def faults_of(kernels: list[CompiledKernel]) -> list[str]:
    return [
        f"{each.kernel} for sm_{each.capability} ({each.specialisation}): {each.faults}"
        for each in kernels
        if each.faults
    ]


def one_of_each_room() -> None:
    """Launches what is quick to compile; the benchmark compiles all."""
    values, factors, yes = torch.zeros(4096), torch.zeros(128), torch.ones((), dtype=torch.bool)
    elementwise.all_finite(values)
    elementwise.narrow(values, None, 1 / 3, torch.zeros(4096, dtype=torch.bfloat16))
    pair, parts = (factors, factors.clone()), Parts((Matrix(0, 64, 64, 2),))
    low_rank.decompress(values, None, parts, pair, pair, factors, yes)
    orthonormalize(factors, ((2, 64),), None, 1e-12)


@needs_triton
def test_the_benchmark_launches_every_kernel_with_its_kind_of_rounding() -> None:
    """If it fails, the benchmark looks at some kernels only, or a kernel gives other bits than plain torch."""
    launched = set()

    def note(kernel: Any, *args: Any, **options: Any) -> None:
        launched.add((kernel.fn.__name__, options["enable_fp_fusion"]))

    with in_form("triton"), mock.patch.object(JITFunction, "run", note):
        launch_reduced()
    assert launched == {(name, False) for name in UNFUSED} | {(name, True) for name in FUSED}


@pytest.mark.exhaustive
@needs_triton
@pytest.mark.parametrize(
    ("launch", "capabilities", "names"),
    [
        (launch_reduced, [90], UNFUSED | FUSED),
        (one_of_each_room, DEVICES, {"_find_bad", "_narrow", "_decompress", "_multiply_candidates", "_apply"}),
    ],
)
def test_kernels_compile_and_spill_no_registers(
    launch: Callable[[], None], capabilities: list[int], names: set[str]
) -> None:
    """If it fails, the first backward on such a device fails, or every step is slower than it need be."""
    kernels = compile_kernels(launch, capabilities)
    assert {each.kernel for each in kernels} == names
    assert {each.capability for each in kernels} == set(capabilities)
    assert all(each.error or each.num_registers > 0 for each in kernels)
    assert faults_of(kernels) == []
