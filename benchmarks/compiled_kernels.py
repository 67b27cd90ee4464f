"""Compiles our Triton kernels for devices that are not there, as the public functions launch them, and looks at them.

A kernel counts as faulty if it does not compile, if it spills registers in float32, if it takes 48 KiB of shared memory
or more, or if it flushes subnormal numbers, which other versions of Triton would not do. Then the exit status is 1.

    python benchmarks/compiled_kernels.py                                 # every specialisation, ten minutes
    python benchmarks/compiled_kernels.py --reduced --capabilities 75     # one of each kernel
    bash benchmarks/kernels_with_triton.sh 3.2.0 --reduced                # with another Triton

Occupancy is what registers and shared memory allow: resident warps over the most that a multiprocessor holds.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from results_file import write_result
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from lightning_commopt.compressors.kernels import (
    blockwise,
    dispatch,
    elementwise,
    low_rank,
)
from lightning_commopt.compressors.kernels.blockwise_format import BlockFormat, Undo
from lightning_commopt.compressors.kernels.factors import Matrix, Parts, factors_numel, orthonormalize

CAPABILITIES = (80, 90, 100)
SHARED_LIMIT_BYTES = 48 * 1024
_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
_REGISTERS_PER_MULTIPROCESSOR = 65536
_MAX_WARPS = {75: 32, 80: 64, 86: 48, 89: 48, 90: 64, 100: 64, 120: 48}
_SHARED_BYTES = {75: 64, 80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_YES = torch.ones((), dtype=torch.bool)


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """One specialisation of a kernel for one device.

    Attributes:
        kernel: its name.
        capability: of the device, 90 for sm_90.
        specialisation: types and constants.
        num_warps: of a program.
        num_registers: of a thread.
        spilled_bytes: of a thread.
        shared_bytes: of a program.
        flushes_subnormals: whether an instruction does.
        occupancy: 0 to 1.
        compile_s: seconds that it took.
        error: why it did not compile; the rest means nothing then.
    """

    kernel: str
    capability: int
    specialisation: str
    num_warps: int = 0
    num_registers: int = 0
    spilled_bytes: int = 0
    shared_bytes: int = 0
    flushes_subnormals: bool = False
    occupancy: float = 0.0
    compile_s: float = 0.0
    error: str = ""

    @property
    def faults(self) -> list[str]:
        """What is wrong with it."""
        is_double = "fp64" in self.specialisation
        found = {
            self.error: bool(self.error),
            f"spills {self.spilled_bytes} bytes": self.spilled_bytes > 0 and not is_double,
            f"takes {self.shared_bytes} bytes of shared memory": self.shared_bytes >= SHARED_LIMIT_BYTES,
            "flushes subnormal numbers": self.flushes_subnormals,
        }
        return [fault for fault, is_there in found.items() if is_there]


def compile_kernels(launch: Callable[[], None], capabilities: Sequence[int]) -> list[CompiledKernel]:
    """Returns all kernels that ``launch`` would launch on devices of these capabilities."""
    kernels: dict[tuple[str, int, str], CompiledKernel] = {}
    compile_only = JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        for capability in capabilities:
            driver.set_active(_Device(capability))
            start = time.perf_counter()
            name = kernel.fn.__name__
            try:
                compiled = compile_only(kernel, *args, grid=(1,), warmup=True, **kwargs)
            except Exception as error:
                said = f"{type(error).__name__}: {error}".strip().splitlines()
                kernels[name, capability, said[-1]] = CompiledKernel(
                    kernel=name, capability=capability, specialisation=_types(args), error=" ".join(said)[:300]
                )
                continue
            if (name, capability, compiled.hash) not in kernels:
                compile_s = time.perf_counter() - start
                kernels[name, capability, compiled.hash] = _examined(compiled, name, capability, compile_s)

    with mock.patch.object(JITFunction, "run", run), mock.patch.object(dispatch, "form_for", return_value="triton"):
        try:
            launch()
        finally:
            with suppress(RuntimeError):  # this machine may have no device
                driver.reset_active()
    return list(kernels.values())


class _Device:
    """A driver of a device that nothing runs on."""

    def __init__(self, capability: int) -> None:
        self.get_current_target = lambda: GPUTarget("cuda", capability, 32)
        self.get_current_device = lambda: capability  # kernels are kept for each device
        self.get_current_stream = lambda device: 0
        self.get_device_interface = lambda: torch.cuda
        self.get_active_torch_device = lambda: torch.device("cpu")


def _types(args: Sequence[Any]) -> str:
    return ", ".join(str(arg.dtype).removeprefix("torch.") for arg in args if isinstance(arg, torch.Tensor))


# Triton before 3.4 has no other square root. The one in int4 is of numbers far from subnormal ones.
_FLUSHING = re.compile(r"(?<!sqrt\.rn)\.ftz")


def _examined(compiled: Any, name: str, capability: int, compile_s: float) -> CompiledKernel:
    ptx = compiled.asm["ptx"]
    registers, spilled_bytes = _resources(ptx)
    num_warps, shared_bytes = compiled.metadata.num_warps, compiled.metadata.shared
    constants = [str(value) for value in compiled.src.constants.values()]
    return CompiledKernel(
        kernel=name,
        capability=capability,
        specialisation=f"{', '.join(map(str, compiled.src.signature.values()))}; {', '.join(constants)}",
        num_warps=num_warps,
        num_registers=registers,
        spilled_bytes=spilled_bytes,
        shared_bytes=shared_bytes,
        flushes_subnormals=_FLUSHING.search(ptx) is not None,
        occupancy=_occupancy(capability, num_warps, registers, shared_bytes),
        compile_s=compile_s,
    )


def _resources(ptx: str) -> tuple[int, int]:
    """Returns the registers of a thread and the bytes that it spills, as the assembler says."""
    target = re.search(r"\.target (sm_\w+)", ptx)
    assert target
    said = ""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        for assembler in sorted(_TOOLS.glob("ptxas*")):  # of two only the newer one may know the device
            command = [str(assembler), "-v", f"--gpu-name={target[1]}", file.name, "-o", os.devnull]
            said = subprocess.run(command, capture_output=True, text=True).stderr
            if used := re.search(r"Used (\d+) registers", said):
                spilled = re.search(r"(\d+) bytes spill stores", said)
                return int(used[1]), int(spilled[1]) if spilled else 0
    raise RuntimeError(said)


def _occupancy(capability: int, num_warps: int, num_registers: int, shared_bytes: int) -> float:
    most_warps = _MAX_WARPS.get(capability, 48)
    by_registers = _REGISTERS_PER_MULTIPROCESSOR // (-(-num_registers // 8) * 8 * 32 * num_warps)
    by_shared = _SHARED_BYTES.get(capability, 100) * 1024 // (shared_bytes + 1024)
    return min(most_warps // num_warps, by_registers, by_shared) * num_warps / most_warps


def launch_all() -> None:
    """Launches every kernel in the specialisations that training can reach, with some numbers of ranks for blocks."""
    _launch_finite(_FLOATS)
    _launch_cast(_FLOATS)
    residual_dtypes = (None, torch.float32, torch.bfloat16)
    for block_format in (BlockFormat(8, 128), BlockFormat(4, 32)):
        _launch_blockwise(_FLOATS, block_format, 8, residual_dtypes)
        for world_size in (1, 2, 3, 16):
            _launch_blockwise(_FLOATS[:1], block_format, world_size, residual_dtypes)
    for bits, sizes in ((8, (16, 32, 64, 256)), (4, (64, 128, 256))):
        for block_size in sizes:
            _launch_blockwise(_FLOATS[:1], BlockFormat(bits, block_size), 8, residual_dtypes)
    sides = ([(300, 32), (40, 260)], [(9, 13)], [(768, 3072), (3072, 768)])
    for dtype, its_sides, r in product(_FLOATS[:2], sides, (1, 2, 4, 8, 16, 32, 64)):
        _launch_low_rank(dtype, its_sides, r)


def launch_reduced() -> None:
    """Launches every kernel, in the specialisation that training reaches most often."""
    _launch_finite(_FLOATS[:1])
    _launch_cast(_FLOATS[:1])
    for block_format in (BlockFormat(8, 128), BlockFormat(4, 32)):
        _launch_blockwise(_FLOATS[:1], block_format, 8, (torch.float32,))
    for r in (4, 16):  # _combine is for many rows only
        _launch_low_rank(torch.float32, [(300, 32), (40, 260)], r)


def _launch_finite(dtypes: Sequence[torch.dtype]) -> None:
    for dtype, numel in product(dtypes, (5, 2**14)):  # one flag, and two
        elementwise.all_finite(torch.zeros(numel, dtype=dtype))


def _launch_cast(dtypes: Sequence[torch.dtype]) -> None:
    for dtype, numel, out_dtype in product(dtypes, (4099, 4096), (torch.bfloat16, torch.float16)):
        flat, out = torch.zeros(numel, dtype=dtype), torch.zeros(numel, dtype=out_dtype)
        wide = torch.promote_types(dtype, torch.float32)
        elementwise.narrow(flat, None, 1 / 3, out)
        elementwise.convert(out, flat)
        for sums in (torch.zeros(numel, dtype=wide), None):
            elementwise.sum_rows(out.repeat(8, 1), sums, out, wide)
        for residual_dtype in (wide, torch.bfloat16):
            residual = torch.zeros(numel, dtype=residual_dtype)
            elementwise.narrow(flat, residual, 1 / 3, out)
            elementwise.widen(flat, residual, out, 1 / 3, _YES)
            elementwise.add_lost(residual, torch.zeros(numel, dtype=wide), out, 3, _YES)


def _launch_blockwise(
    dtypes: Sequence[torch.dtype],
    block_format: BlockFormat,
    world_size: int,
    residual_dtypes: Sequence[torch.dtype | None],
) -> None:
    whole = 16 * world_size * block_format.block_size
    for dtype, residual_dtype, numel in product(dtypes, residual_dtypes, (whole, 1000)):
        row_bytes = block_format.shard_bytes(numel, world_size)
        shard = slice(block_format.shard_numel(numel, world_size))
        message, mean = torch.zeros(world_size, row_bytes, dtype=torch.uint8), torch.zeros(row_bytes, dtype=torch.uint8)
        flat = torch.zeros(numel, dtype=dtype)
        residual = None if residual_dtype is None else torch.zeros(numel, dtype=residual_dtype)
        blockwise.encode(flat, residual, message, block_format)
        blockwise.reduce(message, mean, None if residual is None else residual[shard], block_format)
        blockwise.average(message, flat.new_zeros(block_format.shard_numel(numel, world_size)), block_format)
        undo = None
        if residual is not None:
            undo = Undo(message, message, mean, residual, 0, blockwise.is_finite(message, block_format))
        blockwise.decode(message, flat, block_format, undo)


def _launch_low_rank(dtype: torch.dtype, sides: Sequence[tuple[int, int]], r: int) -> None:
    matrices, numel = [], 0
    for m, k in sides:
        matrices.append(Matrix(numel, m, k, min(r, m, k)))
        numel += m * k
    parts = Parts(tuple(matrices), ((numel, numel + 5),))
    flat, residual = torch.zeros(numel + 5, dtype=dtype), torch.zeros(numel + 5, dtype=dtype)
    p, q = (torch.zeros(factors_numel(shapes), dtype=dtype) for shapes in (parts.p_shapes, parts.q_shapes))
    kept = residual.bfloat16()
    for by_rows, (its_residual, sent) in product((True, False), ((residual, (p, q)), (kept, None), (None, None))):
        factor, own = (q, p) if by_rows else (p, q)
        for own_or_none in (own, None):
            message = torch.zeros(own.numel() + 5, dtype=dtype)
            low_rank.compress(flat, its_residual, parts, sent, factor, message, own_or_none, 1 / 3, by_rows)
    for its_residual in (residual, kept, None):
        low_rank.decompress(flat, its_residual, parts, (p, q), (p, q), torch.cat([q, p[:5]]), _YES)
    low_rank.subtract_product(residual, parts, (p, q), residual, _YES)
    if dtype == torch.float32:
        for old, before in product((None, p.clone()), (None, _YES)):
            orthonormalize(p, parts.p_shapes, old, 1e-12, before)


@contextmanager
def _own_cache() -> Iterator[None]:
    """Compiles anew, so that times are those of a first launch."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": folder}):
        yield


def _table(kernels: Sequence[CompiledKernel]) -> Table:
    columns = ("kernel", "device", "variants", "registers", "spilled B", "shared B", "occupancy", "compile s")
    table = Table(*columns, title=f"Triton {triton.__version__}: the worst of each kernel's specialisations")
    kernels = [each for each in kernels if not each.error]
    for name, capability in sorted({(each.kernel, each.capability) for each in kernels}):
        of_kernel = [each for each in kernels if (each.kernel, each.capability) == (name, capability)]
        worst = [max(getattr(x, key) for x in of_kernel) for key in ("num_registers", "spilled_bytes", "shared_bytes")]
        occupancy = min(each.occupancy for each in of_kernel)
        slowest_s = max(each.compile_s for each in of_kernel)
        cells = [name, f"sm_{capability}", len(of_kernel), *worst, f"{occupancy:.0%}", f"{slowest_s:.2f}"]
        table.add_row(*map(str, cells))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capabilities", type=int, nargs="+", default=list(CAPABILITIES))
    parser.add_argument("--reduced", action="store_true", help="one specialisation of each kernel")
    parser.add_argument("--output", type=Path, help="where to store the result")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with _own_cache():
        kernels = compile_kernels(launch_reduced if arguments.reduced else launch_all, arguments.capabilities)
    Console().print(_table(kernels))
    faulty = [kernel for kernel in kernels if kernel.faults]
    for kernel in faulty:
        print(f"{kernel.kernel} for sm_{kernel.capability} ({kernel.specialisation}): {', '.join(kernel.faults)}")
    if arguments.output is not None:
        # No times: the machine may be busy.
        rows = [{name: value for name, value in asdict(x).items() if name != "compile_s"} for x in kernels]
        write_result(arguments.output, {"triton": triton.__version__, "kernels": rows}, load)
    sys.exit(bool(faulty))


if __name__ == "__main__":
    main()
