"""The bytes of device memory that an operation reads and writes in a step of finite gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

ALLOCATIONS = ("aten::empty", "aten::new_empty")
"""Beginnings of the names of operations that launch no kernel."""
_WRITES_ONLY = (
    "aten::zero",
    "aten::ones",
    "aten::full",
    "aten::fill_",
    "aten::scalar_tensor",
    "aten::new_zeros",
    "aten::arange",
)
_OVERWRITES = ("aten::copy_", "aten::_foreach_copy_", "aten::cat.out")


def of_operation(name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> int:
    """Returns the bytes of an operation of torch on these tensors, in which the same one can be several times."""
    written = {_key(tensor): _num_bytes(tensor) for tensor in writes}
    read = {_key(tensor): _num_bytes(tensor) for tensor in reads}
    if name.startswith(_WRITES_ONLY):
        read = {}
    elif name.startswith(_OVERWRITES) or ".out" in name:
        read = {key: num_bytes for key, num_bytes in read.items() if key not in written}
    return sum(read.values()) + sum(written.values())


def of_kernel(name: str, given: Mapping[str, Any]) -> int:
    """Returns the bytes of a Triton kernel of ours with these arguments, without what only non-finite values need.

    Raises:
        KeyError: the kernel is not in the table.
    """
    return _KERNELS[name](given)


def _key(tensor: Tensor) -> tuple[int, int, int]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.numel()


def _num_bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _sum(*names: str, twice: str = "") -> Callable[[Mapping[str, Any]], int]:
    return lambda given: sum(_num_bytes(given[name]) for name in (*names, *twice.split(), *twice.split()))


def _encode(given: Mapping[str, Any]) -> int:
    return _sum("flat", "message", twice="residual" if given["HAS_RESIDUAL"] else "")(given)


def _find_bad_scales(given: Mapping[str, Any]) -> int:
    scale_bytes = 4 // given["H"]
    return given["num_rows"] * given["num_blocks"] * scale_bytes + _num_bytes(given["flags"])


def _sum_rows(given: Mapping[str, Any]) -> int:
    return _sum("rows", "rounded", *(["out"] if given["HAS_OUT"] else []))(given)


def _narrow(given: Mapping[str, Any]) -> int:
    return _sum("flat", "out", *(["residual"] if given["HAS_RESIDUAL"] else []))(given)


def _reduce(given: Mapping[str, Any]) -> int:
    of_shard = 2 * given["residual"].element_size() * given["numel"] if given["HAS_RESIDUAL"] else 0
    return _sum("received", "mean_message")(given) + of_shard


def _compress(given: Mapping[str, Any]) -> int:
    """As if the bucket had no rest, which is small."""
    folded = _sum("sent_p", "sent_q", twice="residual")(given) if given["RESIDUAL"] == 1 else 0
    added = _sum("residual", "bucket")(given) if given["RESIDUAL"] == 2 else 0
    return _sum("bucket", "factor", "partials")(given) + folded + added


def _with_older(*names: str) -> Callable[[Mapping[str, Any]], int]:
    return lambda given: _sum(*names, *(["old"] if given["NUM"] > given["R"] else []))(given)


_KERNELS: dict[str, Callable[[Mapping[str, Any]], int]] = {
    "_narrow": _narrow,
    "_convert": _sum("values", "out"),
    "_sum_rows": _sum_rows,
    "_widen": _sum("mean", twice="flat residual"),
    "_add_lost": _sum("values", "rounded", twice="residual"),
    "_find_bad": _sum("values", "flags"),
    "_combine_flags": _sum("flags", "whole"),
    "_encode": _encode,
    "_reduce": _reduce,
    "_average": _sum("received", "mean"),
    "_find_bad_scales": _find_bad_scales,
    "_decode": _sum("message", "flat"),
    "_compress": _compress,
    "_add_up": lambda given: _sum("partials", "out", *(["own"] if given["HAS_OWN"] else []))(given),
    "_subtract_product": _sum("flat", "out", "factor_p", "factor_q"),
    "_decompress": _sum("bucket", "factor_p", "factor_q"),
    "_multiply_candidates": _with_older("x", "sums"),
    "_combine": _sum("sums"),
    "_apply": _with_older("x", "basis", "sums"),
}
