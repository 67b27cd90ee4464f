"""The sentences and hints of a diagnosis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from textwrap import shorten

from lightning_commopt.text.formatting import ranks_text
from lightning_commopt.watch.hangs.flight_recorder import Difference, Signature, find_departure
from lightning_commopt.watch.hangs.marks import PHASES
from lightning_commopt.watch.hangs.snapshot import SIGTERM_BROADCAST, RankSnapshot

_NAMES_IN_SENTENCE = 2
_DETAIL_WIDTH = 240

_DIED = {
    "SIGKILL": "Look at the end of that rank's own log, and at the kernel's (dmesg | grep -i -E 'oom|killed|xid'): a"
    " process that is out of memory is killed without a message.",
    "SIGABRT": "Look at the end of that rank's own log: an assertion of C++ code, or NCCL's watchdog, which ends a"
    " rank that has waited for the group's timeout.",
    "SIGBUS": "Look at the space that is left in /dev/shm (df -h /dev/shm): dataloader workers put their batches"
    " there.",
    "signal": "Look at the end of that rank's own log; PYTHONFAULTHANDLER=1 prints where a process crashes.",
    "status": "Something has called os._exit, or sys.exit outside of the Trainer: look at the end of that rank's log.",
}
_LAUNCHER = "Start all ranks with one launcher that ends the others (torchrun, srun --kill-on-bad-exit=1)."
_BY_KIND = {
    "unreachable": (
        "Try ping and the scheduler's view of that host; look at its network device (ip -s link, ibstat).",
        "A checkpoint and a launcher that restarts (torchrun --max-restarts) are what saves such a run.",
    ),
    "stopped": ("Continue it with kill -CONT PID; find out who stopped it: Ctrl-Z, a debugger, the scheduler.",),
    "failed": ("Its traceback is in its own log; the others wait only for that.",),
    "exited": ("Call sys.exit on all ranks at the same step, or raise an exception, which ends the job.",),
    "terminated": (
        "SIGTERM comes from a scheduler (a time limit, preemption), a launcher or kill: it must reach all ranks.",
    ),
    "interrupted": (),
    "should_stop": (
        "Set trainer.should_stop on all ranks in the same step:"
        " trainer.should_stop = trainer.strategy.reduce_boolean_decision(stop, all=False).",
    ),
    "ended": (
        "Ranks must have the same number of batches: Trainer(use_distributed_sampler=True), DistributedSampler, or"
        " CommOptDDP(uneven_batches='drop'); look for a return or a break that only one rank reaches.",
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
    """Returns hints, the most likely first; none if the user has interrupted a rank."""
    first = culprits[0]
    if kind == "late":
        found = [_LATE.get(PHASES[first.phase].name, "Look at the place above, and at the stacks in the files.")]
    elif kind == "skipped":
        found = [_UNUSED, _BY_KIND["mismatch"][0]]
    elif kind == "died":
        reason = first.detail.rpartition(" ")[2] if first.detail.startswith("was killed by ") else ""
        name = "status" if first.detail.startswith("exited") else "signal" if reason else "SIGKILL"
        found = [_DIED.get(reason, _DIED[name]), _LAUNCHER]
    elif kind == "failed" and first.detail.startswith("SystemExit"):
        found = [*_BY_KIND["exited"]]
    elif kind == "ended" and first.stop_reason:
        found = [*_BY_KIND["should_stop"]]
    else:
        found = [*_BY_KIND[{"departed": "mismatch", "outlier": "mismatch"}.get(kind, kind)]]
    if found and any(each.missing for each in (*culprits, *waiting)):
        found.append("What could not be read of a rank, and why, is in its file under missing.")
    return tuple(found)


def what(kind: str, each: RankSnapshot) -> str:
    """Describes a rank at fault."""
    where = f"{f'in {each.hook}' if each.hook else PHASES[each.phase].where} of {_position(each)}"
    place = each.place if each.is_waiting or each.is_consequence else each.place or each.innermost
    place = f" ({place})" if place else ""
    if each.worker_places:
        place = f" (worker: {each.worker_places[0]})"
    match kind:
        case "died":
            return f"{{has}} died {where}: process {each.pid} on {each.host} {each.detail or 'is gone'}"
        case "unreachable":
            return f"cannot be {'reached' if each.state == 'unreachable' else 'asked'}: {each.detail}"
        case "stopped":
            return f"{{is}} stopped (process {each.pid} on {each.host}, by a signal or a debugger) {where}{place}"
        case "interrupted":
            return f"{{has}} been interrupted (Ctrl-C or SIGINT) {where}{place}"
        case "terminated" if each.state == "running":
            return f"{{has}} received SIGTERM {where}, and {{wait}} for the others in Lightning's handler"
        case "terminated":
            return f"{{has}} been ended by SIGTERM {where}{place}"
        case "failed" if each.detail.startswith("SystemExit"):
            status = each.detail.partition(": ")[2]
            return f"{{has}} called sys.exit({status}) {where}{place}"
        case "failed":
            return f"{{has}} failed {where}: {shorten(each.detail, _DETAIL_WIDTH, placeholder=' ...')}{place}"
        case "departed":
            departure = find_departure(each.parsed_collectives())
            assert departure is not None
            return f"{{has}} called {departure.called} {where}{place}, after what {departure.expected} followed before"
        case "ended" if each.state == "finished":
            return f"{{has}} ended the fit after {_position(each)}{_reason_text(each)}"
        case "ended":
            return (
                f"{{has}} left training's batches after {_position(each)}{_reason_text(each)}, and {{is}}"
                f" {PHASES[each.phase].where}{place}"
            )
        case "waiting":
            return f"{{wait}} in {operation_text(each)} of {_position(each)}"
    if each.is_waiting and kind == "outlier":
        return f"{{wait}} in {operation_text(each)} of {_position(each)}{place}, unlike the others"
    if each.is_waiting:
        return f"{{is}} behind: {{wait}} in {operation_text(each)} of {_position(each)}{place}"
    return f"{{is}} still {where}{place}"


def _reason_text(each: RankSnapshot) -> str:
    return f", as {each.stop_reason} was set there" if each.stop_reason else ""


def what_skipped(left: RankSnapshot, each: RankSnapshot) -> str:
    """Describes a rank that has skipped the gradient sync that ``left`` is in."""
    place = f" ({each.place})" if each.place else ""
    return (
        f"{{has}} gone on to {_position(each)} without {operation_text(left)} of {_position(left)}, and {{wait}} in"
        f" {operation_text(each)}{place}"
    )


def what_waits(each: RankSnapshot) -> str:
    """Describes a rank that is not at fault."""
    if each.is_waiting:
        place = f" ({each.place})" if each.place and not each.is_syncing else ""
        return f"{{wait}} in {operation_text(each)} of {_position(each)}{place}"
    if each.is_consequence:
        return f"{{has}} {'timed out' if each.has_timed_out else 'lost the connection'}" + (
            f" in {operation_text(each)} of {_position(each)}" if was_waiting(each) else ""
        )
    state = {"running": "late", "finished": "ended"}.get(each.state, each.state)
    return what("unreachable" if each.is_unknown else state, each)


def _position(each: RankSnapshot) -> str:
    return f"batch {each.batch}" if each.batch >= 0 else f"step {each.step}"


def operation_text(each: RankSnapshot) -> str:
    """Returns the operation that a rank waits in, or waited in when it lost its connection."""
    if each.is_syncing or (each.bucket is not None and each.called is None):
        return f"the gradient sync of bucket {each.bucket}{_names_text(each.bucket_names)}"
    if each.hook == SIGTERM_BROADCAST:
        return each.hook
    current = each.current_collective()
    if current is not None:
        return f"{current.signature} (number {current.number} of group {_group_name(current.signature)})"
    return each.called or "a collective"


def _group_name(signature: Signature) -> str:
    return signature.group if signature.group != "0" else "default"


def was_waiting(each: RankSnapshot) -> bool:
    """Returns whether a rank waited in a known operation when it lost its connection."""
    return each.is_consequence and (each.bucket is not None or each.current_collective() is not None)


def operation_of(difference: Difference, waiting: Sequence[RankSnapshot]) -> str | None:
    """Returns the operation that the ranks that are not at fault have called."""
    for each in waiting:
        called = difference.called.get(each.rank)
        if called is not None:
            is_sync = each.is_syncing and _is_still_in(each, called, difference.number)
            return operation_text(each) if is_sync else str(called)
    return operation_text(waiting[0])


def _is_still_in(each: RankSnapshot, called: Signature, number: int) -> bool:
    """Returns whether a rank is still in a collective."""
    return any((one.signature, one.number, one.is_done) == (called, number, False) for one in each.parsed_collectives())


def _names_text(names: Sequence[str]) -> str:
    if not names:
        return ""
    if len(names) <= _NAMES_IN_SENTENCE:
        return f" ({', '.join(names)})"
    levels = zip(*(name.split(".") for name in names), strict=False)
    prefix = [level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels)]
    return f" ({'.'.join(prefix)}.*)" if prefix else f" ({names[0]} ... {names[-1]})"


def difference_text(difference: Difference, everybody: Sequence[RankSnapshot]) -> str:
    """Describes ranks that are not in the same collective."""
    sides: dict[Signature | None, list[int]] = defaultdict(list)
    for rank, called in difference.called.items():
        sides[called].append(rank)
    known = next(called for called in sides if called is not None)
    at_fault = set(difference.ranks)
    by_rank = {each.rank: each for each in everybody}

    def side(called: Signature | None, ranks: list[int]) -> str:
        each = by_rank[ranks[0]]
        place = f" ({each.place})" if each.place else ""
        verb = "has" if len(ranks) == 1 else "have"
        if called is not None:
            is_sync = each.is_syncing and _is_still_in(each, called, difference.number)
            sync = f", in {operation_text(each)}" if is_sync else ""
            return f"{ranks_text(ranks)} {verb} called {called}{sync}{place}"
        now = (
            f", and {'waits' if len(ranks) == 1 else 'wait'} in {operation_text(each)}{place}"
            if each.is_waiting
            else ""
        )
        return f"{ranks_text(ranks)} {verb} not called it{now}"

    parts = [side(called, ranks) for called, ranks in sorted(sides.items(), key=lambda item: item[0] is None)]
    if difference.is_certain and None in sides and not at_fault & set(sides[None]):
        parts.append(f"{ranks_text(sorted(at_fault))} departs from the order of the steps before")
    return f"collective {difference.number} of group {_group_name(known)} differs: {'; '.join(parts)}"


def group_text(snapshots: Iterable[RankSnapshot], describe: Callable[[RankSnapshot], str]) -> str:
    """Returns descriptions of all ranks, those with equal ones together."""
    groups: dict[str, list[int]] = defaultdict(list)
    for each in snapshots:
        groups[describe(each)].append(each.rank)
    parts = []
    for text, ranks in groups.items():
        one = len(ranks) == 1
        for word, singular in (("has", "has"), ("is", "is"), ("wait", "waits")):
            plural = {"has": "have", "is": "are", "wait": "wait"}[word]
            text = text.replace(f"{{{word}}}", singular if one else plural)
        parts.append(f"{ranks_text(ranks)} {text}")
    return "; ".join(parts)
