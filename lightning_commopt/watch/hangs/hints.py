"""What to try, for each kind of hang."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_commopt.watch.hangs.phases import PHASES
from lightning_commopt.watch.hangs.snapshot import RankSnapshot

_BY_KIND = {
    "died": (
        "Look at the end of that rank's own log, and at the kernel's (dmesg | grep -i -E 'oom|killed|xid'): a process"
        " that is out of memory is killed without a word.",
        "Start all ranks with one launcher that ends the others (torchrun, srun --kill-on-bad-exit=1).",
    ),
    "unreachable": (
        "Try ping and the scheduler's view of that host; look at its network device (ip -s link, ibstat).",
        "A checkpoint and a launcher that restarts (torchrun --max-restarts) are what saves such a run.",
    ),
    "stopped": ("Continue it with kill -CONT PID; find out who stopped it: Ctrl-Z, a debugger, the scheduler.",),
    "failed": ("Its traceback is in its own log; the others wait only for that.",),
    "ended": (
        "Ranks must have the same number of batches: Trainer(use_distributed_sampler=True), DistributedSampler, or"
        " CommOptDDP(uneven_batches='drop'); look for a return or a break that only one rank comes to.",
    ),
    "mismatch": (
        "Every rank must call the same collectives in the same order, with tensors of the same sizes: look for"
        " self.log(..., sync_dist=True), all_gather or barrier under an if that is not the same on all ranks.",
        "Metrics that are updated on some ranks only, and rank_zero_only around something that calls a collective, do"
        " the same.",
    ),
    "waiting": (
        "All ranks are in the same collective, so the network does not deliver: look at links, firewalls, and the"
        " interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME); commopt doctor checks them.",
    ),
}
_UNUSED = (
    "A parameter that this rank has not used keeps its bucket from being ready: find_unused_parameters=True, or use all"
    " parameters on all ranks."
)
_LATE = {
    "data": "Look at what the dataset or its worker waits for: a file system, a download, a lock; timeout=60 on the"
    " DataLoader turns it into an error.",
    "forward": "Look at the place above: a lock, a file, a compiler, or a wait for something that only other ranks do.",
    "backward": f"{_UNUSED} Or a custom backward waits.",
    "checkpoint": "Look at the file system that checkpoints go to.",
    "callbacks": "Look at callbacks and loggers: a logger's server, an upload, or work for rank 0 only.",
}


def hints_for(kind: str, culprits: Sequence[RankSnapshot], waiting: Sequence[RankSnapshot]) -> tuple[str, ...]:
    """Returns what to try, the most likely first."""
    if kind == "late":
        name = PHASES[culprits[0].phase].name
        found = [_LATE.get(name, "Look at the place above, and at the stacks in the files.")]
    elif kind == "skipped":
        found = [_UNUSED, _BY_KIND["mismatch"][0]]
    else:
        found = list(_BY_KIND["mismatch" if kind == "departed" else kind])
    if any(each.missing for each in (*culprits, *waiting)):
        found.append("What could not be had of a rank, and why, is in its file under missing.")
    return tuple(found)
