"""ShardedWorkload: what a rank computes, gathers and reduces in a step of FSDP2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lightning_commopt.compressors import ShardedCompressor
from lightning_commopt.compressors.sharded import ShardedInt8
from lightning_commopt.text.validation import check_choice, check_integer

AS_INT8 = ShardedInt8()
"""``param_hook="int8"`` sends parameters in the format that this compressor has for gradients."""


class Payload(NamedTuple):
    """What one kind of collectives carries for a unit, for all shards together."""

    matrix_numel: int  # elements of parameters of several dimensions, with the padding of shards
    vector_numel: int  # elements of the other parameters, which no hook compresses
    itemsize: int  # bytes of an element without compression

    @property
    def num_bytes(self) -> int:
        return (self.matrix_numel + self.vector_numel) * self.itemsize

    @property
    def matrix_bytes(self) -> int:
        return self.matrix_numel * self.itemsize

    def sent_bytes(self, compressor: ShardedCompressor | None, num_ranks: int) -> int:
        """Returns the bytes that a rank hands to the collective, with a compressor or without."""
        if compressor is None or not self.matrix_numel:
            return self.num_bytes
        compressed = compressor.message_bytes(-(-self.matrix_numel // num_ranks), num_ranks)
        return compressed + self.vector_numel * self.itemsize


class Unit(NamedTuple):
    """What FSDP2 gathers and reduces together."""

    name: str  # the name of its first parameter
    gradients: Payload
    parameters: Payload


class Call(NamedTuple):
    """A collective of backward, in the order in which the thread that computes issues them."""

    operation: str  # "all_gather" or "reduce_scatter"
    unit: int  # place in `ShardedWorkload.units`
    after_s: float  # computation between the call before, or the start of backward, and this one; 0 on CUDA


class Exposure(NamedTuple):
    """The collectives of one operation in a batch, on CUDA."""

    seconds: float = 0.0  # sum of the times that they are predicted to take
    exposed_s: float = 0.0  # how long the device's computation waits for them


_NOT_KNOWN = Exposure()


@dataclass(frozen=True, kw_only=True)
class ShardedWorkload:
    """One optimizer step of one rank. Times are medians."""

    units: tuple[Unit, ...]
    forward: tuple[int, ...]  # the units that the forward of a batch gathers, by place
    backward: tuple[Call, ...]  # the collectives of a backward whose gradients are reduced
    step_s: float  # measured
    once_s: float  # the part of a step that does not grow with the number of batches: optimizer, hooks
    num_batches: int = 1  # batches that are accumulated for a step
    spread_s: float = 0.0  # standard deviation of the median of ten steps
    waited_s: float | None = None  # how long a step waits for collectives, measured; None on CUDA, see `gathers`
    straggler_s: float = 0.0  # how long a rank waits in a step for the last rank; 0 on CUDA, as it is unknown there
    num_ranks: int = 1  # ranks that the step was measured on, each with a shard
    shares_core: bool = False  # compression has no processor of its own, so that it slows backward down
    num_others: float = 0.0  # threads of other programs that want this rank's processor, on average
    device: str = "cpu"  # "cpu" or "cuda"
    # On CPU both are zero, since there every all-gather and every reduce-scatter blocks.
    gathers: Exposure = _NOT_KNOWN  # the all-gathers in forward and backward
    reduces: Exposure = _NOT_KNOWN  # the reduce-scatters

    def __post_init__(self) -> None:
        check_integer("num_ranks", self.num_ranks, at_least=1)
        check_integer("num_batches", self.num_batches, at_least=1)
        for place in (*self.forward, *(call.unit for call in self.backward)):
            if not 0 <= place < len(self.units):
                raise ValueError(f"unit {place} is not one of {len(self.units)}")
        for operation, _, _ in self.backward:
            check_choice("operation", operation, ("all_gather", "reduce_scatter"))

    @property
    def backward_s(self) -> float:
        """Computation of a backward up to its last collective."""
        return sum(call.after_s for call in self.backward)
