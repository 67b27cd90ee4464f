"""A ring over all GPUs, as NCCL looks for it: by the fastest links that close one."""

from __future__ import annotations

from typing import NamedTuple

from lightning_commopt.commands.topology.machine import KINDS, Machine

_MAX_STEPS = 20_000


class Ring(NamedTuple):
    """An order of all GPUs.

    Attributes:
        labels: the last is a neighbour of the first.
        worst: the slowest kind of link between neighbours.
        num_worst: how many neighbours it lies between.
    """

    labels: tuple[str, ...]
    worst: str
    num_worst: int


def find_ring(machine: Machine) -> Ring | None:
    """Finds a ring whose slowest link is as fast as can be, with as few of the slowest as a simple search finds.

    Returns:
        None with less than two GPUs, or where links are not known.
    """
    labels = [gpu.label for gpu in machine.gpus]
    if len(labels) < 2:
        return None
    for distance, kind in enumerate(KINDS):
        peers = _peers(machine, labels, distance)
        if any(not others for others in peers.values()):
            continue
        better = _peers(machine, labels, distance - 1)
        # With peers over faster links first, the search stays among them as long as it can.
        found = _search(labels, {each: list(dict.fromkeys((*better[each], *peers[each]))) for each in labels})
        if found is not None:
            pairs = set(map(frozenset, zip(found, (*found[1:], found[0]), strict=True)))
            links = [machine.links[pair] for pair in pairs]
            return Ring(found, kind, sum(link.kind == kind for link in links))
    return None


def _peers(machine: Machine, labels: list[str], distance: int) -> dict[str, list[str]]:
    return {
        one: [
            other
            for other in labels
            if other != one and (link := machine.link(one, other)) is not None and link.distance <= distance
        ]
        for one in labels
    }


def _search(labels: list[str], peers: dict[str, list[str]]) -> tuple[str, ...] | None:
    """Searches for a closed way over all labels, depth first; gives up after so many steps."""
    way = [labels[0]]
    choices = [iter(peers[labels[0]])]
    for _ in range(_MAX_STEPS):
        if not choices:
            return None
        if len(way) == len(labels) and (len(way) == 2 or labels[0] in peers[way[-1]]):
            return tuple(way)
        step = next((each for each in choices[-1] if each not in way), None)
        if step is None:
            way.pop()
            choices.pop()
        else:
            way.append(step)
            choices.append(iter(peers[step]))
    return None
