"""Triton's kernels compile for devices that are not there, as training launches them; see the benchmark."""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from forms import needs_triton

pytest.importorskip("triton")
import compiled_kernels
from compiled_kernels import CAPABILITIES, CompiledKernel, compile_kernels, launch_reduced

from lightning_commopt.kernels.blockwise_format import BlockFormat

# Triton 3.2 has no bfloat16 for sm_75, and no sm_100.
IS_OLD = tuple(map(int, version("triton").split(".")[:2])) < (3, 5)
DEVICES = [80, 90] if IS_OLD else [75, *CAPABILITIES]
KERNELS = {
    *("_find_bad", "_narrow", "_widen", "_add_lost"),
    *("_encode", "_reduce", "_decode", "_undo", "_undo_reduce"),
    *("_multiply_tile", "_add_up", "_subtract_product", "_write_product"),
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


def one_int4_step() -> None:
    compiled_kernels._launch_blockwise([torch.float32], BlockFormat(4, 32), 8, [None])


@needs_triton
@pytest.mark.parametrize(
    ("launch", "capabilities", "names"),
    [
        (one_int4_step, [90], {"_encode", "_reduce", "_decode"}),
        pytest.param(launch_reduced, DEVICES, KERNELS, marks=pytest.mark.exhaustive),
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
