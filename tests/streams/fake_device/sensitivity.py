"""Small programs that need a wait, or need memory to be kept, without it and with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from fake_device.device import Outcome, differences, digest, in_all_schedules

_NUMEL = 1000


def write_then_read(side: torch.cuda.Stream, is_right: bool) -> Tensor:
    """Reads on another stream what is written on this one."""
    ones = torch.ones(_NUMEL, device="cuda")
    if is_right:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        return ones * 1


def read_then_write(side: torch.cuda.Stream, is_right: bool) -> Tensor:
    """Writes on another stream over what is read on this one."""
    ones = torch.ones(_NUMEL, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    result = ones * 1
    if is_right:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ones.zero_()
    return result


def free_early(side: torch.cuda.Stream, is_right: bool) -> Tensor:
    """Frees memory of another stream that this one still reads, and allocates there."""
    with torch.cuda.stream(side):
        ones = torch.ones(_NUMEL, device="cuda")
    torch.cuda.current_stream().wait_stream(side)
    result = ones * 1
    if is_right:
        ones.record_stream(torch.cuda.current_stream())
    del ones
    with torch.cuda.stream(side):
        torch.zeros(1, device="cuda")
    return result


def read_from_peers(side: torch.cuda.Stream, is_right: bool) -> Tensor:
    """Reads what a collective brings."""
    with torch.cuda.stream(side):
        ones = torch.ones(_NUMEL, device="cuda")
        received = torch.empty_like(ones)
        work = dist.all_to_all_single(received, ones, async_op=True)
        assert work is not None
        if is_right:
            work.wait()
        result = received * 1
        work.wait()
    return result


Probe = Callable[[torch.cuda.Stream, bool], Tensor]
PROBES: Mapping[str, Probe] = {
    each.__name__: each for each in (write_then_read, read_then_write, free_early, read_from_peers)
}


def run_probes() -> dict[str, tuple[bool, bool]]:
    """Returns whether an error shows, without what each program needs and with it."""
    torch.cuda.set_device(dist.get_rank())
    side = torch.cuda.Stream()
    dist.all_reduce(torch.ones(1, device="cuda"))  # makes NCCL's stream
    return {name: (_shows(probe, side, False), _shows(probe, side, True)) for name, probe in PROBES.items()}


def _shows(probe: Probe, side: torch.cuda.Stream, is_right: bool) -> bool:
    def run() -> Outcome:
        result = probe(side, is_right)
        torch.cuda.synchronize()
        return Outcome(digest([result]), "")

    return differences([in_all_schedules(run)]) != []
