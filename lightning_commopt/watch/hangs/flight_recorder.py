"""Collectives that ranks have called, from torch's Flight Recorder, and where they differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_commopt.text.formatting import grouped

_MAX_CONTEXT = 12
"""Maximum number of collectives whose order is compared with earlier ones. It is a judgement: enough to distinguish the
places of a step in which the same collective occurs, while more would only cost time."""
BACKGROUND_GROUP = "commopt background"
"""Description of groups whose collectives nobody waits for, so that they do not show where a rank is."""


class Signature(NamedTuple):
    """What must be equal on all ranks of a collective: group, operation, sizes and dtypes of its inputs."""

    group: str
    operation: str
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.operation, *(str(size) for size in self.sizes)))


class Collective(NamedTuple):
    """A collective that this rank has called."""

    signature: Signature  # what was called
    number: int  # its number in its group, from 1; equal on all ranks that are in step
    is_done: bool  # whether it has ended on this rank
    called_unix_s: float = 0.0  # time of the call, in seconds since 1970


class Departure(NamedTuple):
    """A collective that is not the expected one."""

    called: Signature
    expected: Signature


@dataclass(frozen=True)
class Difference:
    """Ranks that are not in the same collective of a group."""

    ranks: tuple[int, ...]  # the ranks at fault; all sides if it is unknown which
    number: int  # the number of the collective in its group
    # What each rank has called under that number; None if it has not called it yet.
    called: Mapping[int, Signature | None]
    is_certain: bool  # whether the side at fault is known, because it departs from the earlier order


def parse_collectives(dump: Any) -> list[Collective]:
    """Returns the collectives in the Flight Recorder's JSON, the oldest first.

    It does not contain point-to-point messages, nor what `CommTimeMonitor` gathers in the background: these gathers
    occur only in some steps, such as every 50th, so their place among the others would look like a changed order.
    """
    entries = dump.get("entries", []) if isinstance(dump, dict) else []
    collected = []
    for entry in entries:
        name, *description = entry.get("process_group") or ["?"]
        if entry.get("is_p2p") or not entry.get("collective_seq_id") or BACKGROUND_GROUP in description:
            continue
        signature = Signature(
            str(name),
            str(entry.get("profiling_name", "?")).rpartition(":")[2].lstrip("_"),
            tuple(tuple(size) for size in entry.get("input_sizes", ())),
            tuple(entry.get("input_dtypes", ())),
        )
        is_done = bool(entry.get("retired")) or entry.get("state") == "completed"
        called_unix_s = entry.get("time_created_ns", 0) / 1e9
        collected.append(Collective(signature, int(entry["collective_seq_id"]), is_done, called_unix_s))
    return collected


def last_progress_unix_s(dump: Any) -> float:
    """Returns when the rank has last called a collective or a message, or seen one end, in seconds since 1970.

    0 if nothing is recorded. Only NCCL records when a collective ends.
    """
    entries = dump.get("entries", []) if isinstance(dump, dict) else []
    kinds = ("time_created_ns", "time_discovered_completed_ns")
    return max((entry.get(kind) or 0 for entry in entries for kind in kinds), default=0) / 1e9


def find_difference(by_rank: Mapping[int, Sequence[Collective]]) -> Difference | None:
    """Finds the collective in which ranks differ.

    First one whose signature is not the same on all ranks that have called that number. Then one that a rank waits in
    while another rank of the group is in a collective of another group: the earlier calls of the two show which of them
    has left the order. None if there is no such collective.

    Args:
        by_rank: the collectives of each rank that has a record, the oldest first.
    """
    return _find_unequal(by_rank) or _find_absent(by_rank)


def _find_unequal(by_rank: Mapping[int, Sequence[Collective]]) -> Difference | None:
    numbered: dict[tuple[str, int], dict[int, Signature]] = defaultdict(dict)
    for rank, collectives in by_rank.items():
        for collective in collectives:
            numbered[collective.signature.group, collective.number][rank] = collective.signature
    for (group, number), called in sorted(numbered.items(), key=lambda item: item[0][1]):
        if len({_comparable(signature) for signature in called.values()}) < 2:
            continue
        history = [
            collective.signature
            for collective in next(iter(by_rank[rank] for rank in called))
            if collective.signature.group == group and collective.number < number
        ]
        ranks, is_certain = _at_fault(called, next(iter(_followers(history)), None))
        return Difference(ranks, number, called, is_certain)
    return None


def _find_absent(by_rank: Mapping[int, Sequence[Collective]]) -> Difference | None:
    reached: dict[tuple[str, int], int] = {}
    for rank, collectives in by_rank.items():
        for collective in collectives:
            key = collective.signature.group, rank
            reached[key] = max(reached.get(key, 0), collective.number)
    absent = {}
    for rank, collectives in by_rank.items():
        for collective in [collective for collective in collectives if not collective.is_done][:1]:
            group = collective.signature.group
            if others := [other for other in by_rank if 0 < reached.get((group, other), 0) < collective.number]:
                absent[rank] = collective, others
    if not absent:
        return None
    departed = tuple(sorted(rank for rank in absent if find_departure(by_rank[rank])))
    is_certain = 0 < len(departed) < len(by_rank)
    missing = sorted({other for _, others in absent.values() for other in others})
    ranks = departed if is_certain else tuple(missing)
    victim = next((rank for rank in absent if rank not in ranks), next(iter(absent)))
    collective, _ = absent[victim]
    called = {
        rank: collective.signature if reached.get((collective.signature.group, rank), 0) >= collective.number else None
        for rank in by_rank
    }
    return Difference(ranks, collective.number, called, is_certain or set(missing) != set(absent))


def find_departure(
    collectives: Sequence[Collective], *, min_context: int = 1, is_new: bool = False
) -> Departure | None:
    """Returns how the current collective differs from what followed the same ones before; None if it does not.

    Args:
        collectives: what the rank has called, the oldest first. If all are done, the last one counts as current.
        min_context: number of preceding collectives that must have occurred before in the same order.
        is_new: whether the current one must never have followed these, not only not the last time: what follows the
            same ones at the end of an epoch is different from what follows them in its middle.
    """
    not_done = [place for place, collective in enumerate(collectives) if not collective.is_done]
    place = next(iter(not_done), len(collectives) - 1)
    history = [collective.signature for collective in collectives[: max(place, 0)]]
    followers = _followers(history, min_context)
    known = followers if is_new else followers[:1]
    if not known or _comparable(collectives[place].signature) in map(_comparable, known):
        return None
    return Departure(collectives[place].signature, followers[0])


def _followers(history: Sequence[Signature], min_context: int = 1) -> list[Signature]:
    """Returns what followed earlier occurrences of the end of a history, as long as possible; the latest first."""
    keys = [_comparable(signature) for signature in history]
    for length in range(min(_MAX_CONTEXT, len(keys) - 1), min_context - 1, -1):
        starts = range(len(keys) - length - 1, -1, -1)
        followers = [history[start + length] for start in starts if keys[start : start + length] == keys[-length:]]
        if followers:
            return followers
    return []


def _at_fault(called: Mapping[int, Signature], expected: Signature | None) -> tuple[tuple[int, ...], bool]:
    """Returns the ranks that have called the wrong collective, and whether that is certain."""
    sides = grouped((_comparable(signature), rank) for rank, signature in called.items())
    right = sides.get(_comparable(expected)) if expected is not None else None
    if right is not None:
        return tuple(sorted(rank for rank in called if rank not in right)), True
    largest = max(len(ranks) for ranks in sides.values())
    majority = [ranks for ranks in sides.values() if len(ranks) == largest]
    if len(majority) > 1:
        return tuple(sorted(called)), False
    return tuple(sorted(rank for rank in called if rank not in majority[0])), True


def _comparable(signature: Signature) -> object:
    """Returns the part to compare: the root of a scatter or gather has tensors that others lack."""
    if signature.operation in ("scatter", "gather", "barrier"):
        return signature.group, signature.operation
    return signature
