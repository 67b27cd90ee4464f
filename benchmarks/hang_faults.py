"""The faults that `hangs.py` injects, and what must be reported of each: written down before any run."""

from collections.abc import Collection
from dataclasses import dataclass

_AFTER_S = 5.0
_REPORT_S = _AFTER_S + 10.0
_CALLBACK_S = 10 * _AFTER_S + 10.0
_GROUP_TIMEOUT_S = 40.0


@dataclass(frozen=True, kw_only=True)
class Message:
    """What `CommOptDDP` prints of a fault by itself, on stderr of a rank other than that at fault.

    Attributes:
        pattern: of what it prints; ``{rank}`` is the rank at fault.
        is_own: whether it counts on stderr of the rank at fault too, as only it can know.
        is_before_training: it comes before the first step, and has all that there is to report. Another one leaves it
            to a `HangMonitor` to report the phase and the operation.
        is_enough: it is all that there is to report, as all ranks end by themselves and none is waited for.
        operation: pattern of what ranks do according to it; None where they are in no operation, and it must name none.
    """

    pattern: str
    is_own: bool = False
    is_before_training: bool = False
    is_enough: bool = False
    operation: str | None = None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault, the job that it happens in, and what must be reported of it.

    Attributes:
        what: in words.
        rank: the rank at fault, which must be the only one that is named.
        kinds: of a `HangMonitor`'s report that are right; none where it must come to no report.
        phases: that are right.
        operation: pattern of the operation that a report must name.
        sentence: pattern of what the sentence of a report must contain too; ``{rank}`` is the rank at fault.
        message: of `CommOptDDP`; None where it prints nothing.
        world_size: number of ranks; 3 where collectives are compared, as of two that differ neither is the odd one.
        needs_lab: each rank is on a host of its own.
        strategies: that can report it.
        is_cut_off: the rank at fault is out of reach, so it reports by itself which others it cannot reach.
        is_survivor: the process of the rank at fault cannot end by itself.
        group_timeout_s: of the process group.
        limit_s: from the fault until it must have been reported: ``after_s`` and 10 s, ten times ``after_s`` and 10 s
            in callbacks, or the group's timeout where the group does not come about.
    """

    what: str
    rank: int = 1
    kinds: Collection[str] = ()
    phases: Collection[str] = ()
    operation: str | None = None
    sentence: str = ""
    message: Message | None = None
    world_size: int = 2
    needs_lab: bool = False
    strategies: Collection[str] = ("ddp", "commopt")
    is_cut_off: bool = False
    is_survivor: bool = False
    group_timeout_s: float = 300.0
    limit_s: float = _REPORT_S


_SYNC = r"^the gradient sync of bucket 0 \("
_REDUCE_OF_3 = r"^all_?reduce \(3,\)"
_ANY = r"gradient sync|broadcast|all_?reduce|all_?gather|barrier"
_STEP = ("forward", "backward")
FAULTS: dict[str, Fault] = {
    "stopped": Fault(
        what="stopped (SIGSTOP)",
        kinds=("stopped",),
        phases=("forward",),
        operation=_SYNC,
        world_size=3,
        is_survivor=True,
    ),
    "killed": Fault(
        what="killed (SIGKILL)",
        kinds=("died",),
        phases=("forward",),
        operation=_SYNC,
        message=Message(pattern=r"Rank {rank} has died: its process \d+ has ended"),
        world_size=3,
    ),
    "exception": Fault(
        what="exception",
        kinds=("failed",),
        phases=("forward",),
        operation=_SYNC,
        message=Message(pattern=r"(?s)Rank {rank} has failed:.*ArithmeticError: broken on purpose"),
        world_size=3,
    ),
    "skipped": Fault(
        what="skips a collective",
        kinds=("mismatch", "waiting", "late"),
        phases=_STEP,
        operation=_REDUCE_OF_3,
        world_size=3,
    ),
    "sizes": Fault(
        what="tensor of another size", kinds=("mismatch",), phases=("forward",), operation=_REDUCE_OF_3, world_size=3
    ),
    "uneven": Fault(
        what="fewer batches",
        kinds=("ended",),
        phases=("backward", "data", "callbacks", "validation"),
        operation=_SYNC,
        message=Message(
            pattern=r"Ranks have different numbers of training batches: .*5 batches on rank {rank}",
            is_before_training=True,
        ),
    ),
    "logging": Fault(
        what="self.log(sync_dist=True) on one rank",
        kinds=("mismatch", "waiting"),
        phases=_STEP,
        operation=_SYNC,
        world_size=3,
    ),
    "worker": Fault(what="dataloader worker sleeps", kinds=("late",), phases=("data",), operation=_SYNC),
    "unused": Fault(
        what="unused parameter on one rank",
        kinds=("failed", "mismatch", "late"),
        phases=_STEP,
        operation=_SYNC,
        message=Message(pattern=r"(?s)Rank {rank} has failed:.*parameters that were not used in producing the loss"),
        world_size=3,
    ),
    "order": Fault(
        what="two collectives in another order",
        kinds=("mismatch",),
        phases=("forward",),
        operation=r"^broadcast \(3,\)",
        world_size=3,
    ),
    "network": Fault(
        what="network gone",
        kinds=("unreachable",),
        phases=("backward",),
        operation=_SYNC,
        needs_lab=True,
        is_cut_off=True,
    ),
    "interface": Fault(
        what="wrong GLOO_SOCKET_IFNAME",
        message=Message(
            pattern=r"rank {rank} on \S+ listens on 9\.9\.9\.9 \(wrong0.*Set GLOO_SOCKET_IFNAME=eth0 on rank {rank}\.",
            is_before_training=True,
            operation=r"all 2 ranks have reached 10\.0\.0\.1:29500, but ranks 0, 1 have not connected to the others",
        ),
        needs_lab=True,
        strategies=("commopt",),
        group_timeout_s=_GROUP_TIMEOUT_S,
        limit_s=_GROUP_TIMEOUT_S,
    ),
    "port": Fault(
        what="port blocked at the start",
        message=Message(
            pattern=r"rank {rank} on \S+ cannot reach rank 0: 10\.0\.0\.1:29500 does not answer .*firewall.*",
            is_own=True,
            is_before_training=True,
            operation=r"rank {rank} on \S+ cannot reach rank 0: 10\.0\.0\.1:29500 does not answer",
        ),
        needs_lab=True,
        strategies=("commopt",),
        group_timeout_s=_GROUP_TIMEOUT_S,
        limit_s=_GROUP_TIMEOUT_S,
    ),
    "absent": Fault(
        what="a host never comes",
        rank=2,
        message=Message(
            pattern=r"waits at 10\.0\.0\.1:29500 for rank {rank}; ranks 0, 1 are here.*",
            is_before_training=True,
            operation=r"rank 0 on \S+ waits at 10\.0\.0\.1:29500 for rank {rank};",
        ),
        world_size=3,
        needs_lab=True,
        strategies=("commopt",),
        group_timeout_s=_GROUP_TIMEOUT_S,
        limit_s=_GROUP_TIMEOUT_S,
    ),
    "batch_end": Fault(
        what="stuck in another callback's on_train_batch_end",
        kinds=("late",),
        phases=("callbacks",),
        operation=_ANY,
        sentence=r"rank {rank} .*\bUpload\.on_train_batch_end\b",
        limit_s=_CALLBACK_S,
    ),
    "optimizer_hook": Fault(
        what="stuck in another callback's on_before_optimizer_step",
        kinds=("late",),
        phases=("callbacks",),
        operation=_ANY,
        sentence=r"rank {rank} .*\bUpload\.on_before_optimizer_step\b",
        limit_s=_CALLBACK_S,
    ),
    "validation_end": Fault(
        what="stuck in another callback's on_validation_epoch_end",
        kinds=("late",),
        phases=("callbacks",),
        operation=_ANY,
        sentence=r"rank {rank} .*\bUpload\.on_validation_epoch_end\b",
        limit_s=_CALLBACK_S,
    ),
    "checkpoint": Fault(
        what="stuck in a subclass of ModelCheckpoint",
        kinds=("late",),
        phases=("callbacks", "checkpoint"),
        operation=_ANY,
        sentence=r"rank {rank} .*\bBackup\.on_train_batch_end\b",
        limit_s=_CALLBACK_S,
    ),
    "logger": Fault(
        what="stuck in a logger",
        rank=0,
        kinds=("late",),
        phases=("callbacks",),
        operation=_ANY,
        sentence=r"rank {rank} .*\bTracker\.log_metrics\b",
        limit_s=_CALLBACK_S,
    ),
    "sys_exit": Fault(
        what="sys.exit(3)",
        kinds=("failed", "died", "ended"),
        phases=(*_STEP, "callbacks"),
        operation=_ANY,
        sentence=r"rank {rank} .*(SystemExit|sys\.exit).*\b3\b",
    ),
    "interrupt": Fault(
        what="KeyboardInterrupt",
        kinds=("failed", "died", "ended", "interrupted"),
        phases=(*_STEP, "callbacks"),
        operation=_ANY,
        sentence=r"[Rr]ank {rank} .*(KeyboardInterrupt|SIGINT)",
        message=Message(pattern=r"Rank {rank} .*(KeyboardInterrupt|SIGINT)", is_enough=True),
    ),
    "should_stop": Fault(
        what="trainer.should_stop on one rank",
        kinds=("failed", "ended"),
        phases=(*_STEP, "data", "callbacks", "validation"),
        operation=_ANY,
        sentence=r"rank {rank} .*should_stop",
        message=Message(pattern=r"Rank {rank} .*should_stop", is_enough=True),
    ),
    "sigterm": Fault(
        what="SIGTERM",
        kinds=("failed", "died", "ended", "late", "mismatch", "terminated"),
        phases=(*_STEP, "data", "callbacks"),
        operation=_ANY,
        sentence=r"rank {rank} .*SIGTERM",
        strategies=("ddp",),
    ),
    "signal": Fault(
        what="SIGKILL, with the signal's name",
        kinds=("died",),
        phases=("forward",),
        operation=_SYNC,
        sentence=r"rank {rank} .*SIGKILL",
    ),
}
